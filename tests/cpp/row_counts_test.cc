// Who gets how many rows: what the leader announces, what a rank makes of it, what it refuses.
#include "scheduler/row_counts.h"

#include "check.h"

namespace tfdist {
namespace {

using Rows = std::vector<int64_t>;

RequestInfo Make(CollectiveKind kind, Rows shape, Rows splits = {}) {
  RequestInfo info;
  info.kind = kind;
  info.dtype = DType::kFloat32;
  info.shapes = {std::move(shape)};
  info.splits = std::move(splits);
  return info;
}

TEST(even_splits_give_the_first_ranks_one_more) {
  CHECK(EvenSplits(7, 3) == Rows({3, 2, 2}));
  CHECK(EvenSplits(8, 3) == Rows({3, 3, 2}));
  CHECK(EvenSplits(2, 4) == Rows({1, 1, 0, 0}));
  CHECK(EvenSplits(0, 2) == Rows({0, 0}));
  CHECK(SplitsOf(Make(CollectiveKind::kScatter, {}), 2) == Rows({1, 0}));  // a scalar: one row
  CHECK(SplitsOf(Make(CollectiveKind::kScatter, {3}, {0, 3}), 2) == Rows({0, 3}));
}

TEST(what_is_announced_follows_from_shapes_and_splits) {
  const auto gather = CollectiveKind::kGather;
  CHECK(AgreedRows({Make(gather, {3, 2}), Make(gather, {0, 2}), Make(gather, {5, 2})}, 1) ==
        Rows({3, 0, 5}));
  CHECK(AgreedRows({Make(CollectiveKind::kAllgather, {}), Make(CollectiveKind::kAllgather, {})},
                   0) == Rows({1, 1}));
  const auto reduce_scatter = CollectiveKind::kReduceScatter;
  CHECK(AgreedRows({Make(reduce_scatter, {5}), Make(reduce_scatter, {5})}, 0) == Rows({3, 2}));
  const auto scatter = CollectiveKind::kScatter;
  CHECK(AgreedRows({Make(scatter, {0}), Make(scatter, {5}, {1, 4})}, 1) == Rows({1, 4}));
  CHECK(AgreedRows({Make(scatter, {4}), Make(scatter, {5}, {1, 4})}, 0) == Rows({2, 2}));
  const auto alltoall = CollectiveKind::kAlltoall;
  CHECK(AgreedRows({Make(alltoall, {4}), Make(alltoall, {7}, {7, 0})}, 0) == Rows({2, 2, 7, 0}));
  CHECK(AgreedRows({Make(CollectiveKind::kAllreduce, {4})}, 0).empty());
}

TEST(the_output_of_a_rank_follows_from_the_announcement) {
  struct Case {
    CollectiveKind kind;
    int root;
    int64_t expected;
  };
  const Rows rows = {3, 0, 5};
  const SetView set = {{1, 4, 7}, {}, 1};
  const std::vector<Case> cases = {
      {CollectiveKind::kAllgather, 0, 8}, {CollectiveKind::kGather, 4, 8},
      {CollectiveKind::kGather, 1, 0},    {CollectiveKind::kReduceScatter, 0, 0},
      {CollectiveKind::kScatter, 7, 0},
  };
  for (const Case& c : cases) {
    RequestInfo own = Make(c.kind, {0, 2});
    own.root = c.root;
    CHECK_EQ_IN(OutputRows(rows, own, set), c.expected, CollectiveKindName(c.kind));
    CHECK(SourceRows(rows, own, set) == rows);
  }
  const RequestInfo own = Make(CollectiveKind::kScatter, {0, 2});
  CHECK_EQ(OutputRows(rows, own, {{1, 4, 7}, {}, 2}), 5);
  const RequestInfo alltoall = Make(CollectiveKind::kAlltoall, {70});
  const SetView pair = {{2, 3}, {}, 1};
  CHECK(SourceRows({1, 2, 30, 40}, alltoall, pair) == Rows({2, 40}));
  CHECK_EQ(OutputRows({1, 2, 30, 40}, alltoall, pair), 42);
}

TEST(an_announcement_that_is_not_for_this_request_is_refused) {
  struct Case {
    RequestInfo own;
    Rows rows;
    int root;
    bool fits;
  };
  const Rows shape = {4, 2};
  const auto gather = CollectiveKind::kGather;
  const auto allgather = CollectiveKind::kAllgather;
  const auto reduce_scatter = CollectiveKind::kReduceScatter;
  const auto scatter = CollectiveKind::kScatter;
  const auto alltoall = CollectiveKind::kAlltoall;
  const std::vector<Case> cases = {
      // as rank 1 of 2
      {Make(gather, shape), {9, 4}, 0, true},
      {Make(gather, shape), {9, 5}, 0, false},
      {Make(allgather, shape), {-1, 4}, 0, false},
      {Make(allgather, shape), {4}, 0, false},
      {Make(allgather, shape), {9, 4, 4}, 0, false},
      {Make(allgather, shape), {INT64_MAX, 4}, 0, false},      // their sum
      {Make(allgather, shape), {INT64_MAX / 4, 4}, 0, false},  // their bytes
      {Make(reduce_scatter, shape), {2, 2}, 0, true},
      {Make(reduce_scatter, shape), {0, 4}, 0, true},
      {Make(reduce_scatter, shape), {2, 3}, 0, false},
      {Make(scatter, shape), {2, 2}, 1, true},
      {Make(scatter, shape), {2, 3}, 1, false},
      {Make(scatter, shape), {2, 3}, 0, true},  // the root's rows are not known here
      {Make(scatter, shape), {5, -1}, 0, false},
      {Make(alltoall, shape), {9, 9, 2, 2}, 0, true},
      {Make(alltoall, shape), {9, 9, 1, 3}, 0, false},
      {Make(alltoall, shape, {1, 3}), {9, 9, 1, 3}, 0, true},
      {Make(alltoall, shape), {9, 9, 2, 2, 1}, 0, false},
      {Make(alltoall, shape), {2, 2}, 0, false},
      {Make(alltoall, shape), {9, -1, 2, 2}, 0, false},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    RequestInfo own = cases[i].own;
    own.root = cases[i].root;
    CHECK_EQ_IN(RowsFit(cases[i].rows, own, {{0, 1}, {}, 1}), cases[i].fits, std::to_string(i));
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
