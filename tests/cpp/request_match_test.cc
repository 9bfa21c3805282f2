// Whether requests of all ranks fit together, and what the error says when they do not.
#include "scheduler/request_match.h"

#include <functional>

#include "check.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define CHECK_CONTAINS(text, part) CHECK_EQ_IN(Contains((text), (part)), true, (text))

RequestInfo Make(CollectiveKind kind, std::vector<int64_t> shape,
                 std::vector<int64_t> splits = {}) {
  RequestInfo info;
  info.key = "x";
  info.kind = kind;
  info.dtype = DType::kFloat32;
  info.timeout_s = 10;
  info.shapes = {std::move(shape)};
  info.splits = std::move(splits);
  return info;
}

RequestInfo Register(const std::string& description) {
  RequestInfo info;
  info.key = "g";
  info.kind = CollectiveKind::kRegister;
  info.description = description;
  info.present = {1, 1};
  return info;
}

RequestInfo Pair(int root, int peer) {
  RequestInfo info = Make(CollectiveKind::kSendRecv, {2});
  info.root = root;
  info.peer = peer;
  return info;
}

const CollectiveKind kRooted[] = {CollectiveKind::kBroadcast, CollectiveKind::kReduce,
                                  CollectiveKind::kGather, CollectiveKind::kScatter};
const CollectiveKind kRagged[] = {CollectiveKind::kAllgather, CollectiveKind::kGather,
                                  CollectiveKind::kScatter, CollectiveKind::kAlltoall};
const CollectiveKind kSameShape[] = {CollectiveKind::kAllreduce, CollectiveKind::kBroadcast,
                                     CollectiveKind::kReduce, CollectiveKind::kReduceScatter,
                                     CollectiveKind::kSendRecv};
const CollectiveKind kReducing[] = {CollectiveKind::kAllreduce, CollectiveKind::kReduce,
                                    CollectiveKind::kReduceScatter};

// A request of `kind` that fits to itself on three ranks.
RequestInfo Valid(CollectiveKind kind) {
  return kind == CollectiveKind::kSendRecv ? Pair(0, 1) : Make(kind, {6, 4});
}

void CheckMismatch(const Status& status, const std::string& what, const std::string& values) {
  CHECK(status.code() == Code::kFailedPrecondition);
  CHECK_CONTAINS(status.message(), "do not agree on " + what);
  CHECK_CONTAINS(status.message(), values);
  CHECK_CONTAINS(status.payload(), "\"kind\": \"mismatch\"");
}

void CheckInvalid(const Status& status, const std::string& values) {
  CHECK_EQ_IN(status.code() == Code::kInvalidArgument, true, status.message());
  CHECK_CONTAINS(status.message(), values);
  CHECK_CONTAINS(status.message(), "\"x\"");
  CHECK_CONTAINS(status.payload(), "\"kind\": \"invalid_argument\"");
}

TEST(every_kind_agrees_with_itself_and_with_no_other) {
  for (CollectiveKind kind : kSameShape) CHECK_OK(CheckRequestsMatch({Valid(kind), Valid(kind)}));
  for (CollectiveKind kind : kRagged) {
    CHECK_OK(CheckRequestsMatch({Valid(kind), Valid(kind), Valid(kind)}));
    for (CollectiveKind other : kSameShape) {
      const Status status = CheckRequestsMatch({Valid(kind), Valid(other), Valid(kind)});
      CheckMismatch(status, "the operation", std::string("rank 1: ") + CollectiveKindName(other));
      CHECK_CONTAINS(status.message(), std::string("ranks 0,2: ") + CollectiveKindName(kind));
    }
  }
}

TEST(dtypes_must_agree_for_every_kind) {
  for (CollectiveKind kind : kRagged) {
    RequestInfo other = Valid(kind);
    other.dtype = DType::kBool;
    CheckMismatch(CheckRequestsMatch({Valid(kind), other}), "the dtype", "rank 1: bool");
  }
}

TEST(where_rows_may_differ_only_rows_may) {
  for (CollectiveKind kind : kRagged) {
    CHECK_OK(CheckRequestsMatch({Make(kind, {3, 2}), Make(kind, {9, 2}), Make(kind, {0, 2})}));
    CheckMismatch(CheckRequestsMatch({Make(kind, {3, 2}), Make(kind, {3, 5}), Make(kind, {3, 2})}),
                  "the shape", "rank 1: rows of shape [5]");
    CheckMismatch(CheckRequestsMatch({Make(kind, {2}), Make(kind, {})}), "the shape",
                  "rank 1: [] (a scalar)");
  }
  for (CollectiveKind kind : kSameShape) {
    RequestInfo other = Valid(kind);
    other.shapes = {{7, 4}};
    CheckMismatch(CheckRequestsMatch({Valid(kind), other}), "the shape", "rank 1: [7,4]");
  }
}

TEST(roots_must_agree_and_be_members) {
  for (CollectiveKind kind : kRooted) {
    RequestInfo a = Valid(kind);
    RequestInfo b = a;
    b.root = 1;
    CheckMismatch(CheckRequestsMatch({a, b, a}), "the root", "ranks 0,2: 0; rank 1: 1");
    for (int root : {-1, 2, 9}) {
      a.root = root;
      CheckInvalid(CheckRequestsMatch({a, a}),
                   "ranks 0,1: root must be in [0, 2), got " + std::to_string(root));
    }
    a.root = 0;
    CheckInvalid(CheckRequestsMatch({a, a}, {1, 5}), "ranks 1,5: root must be in ranks 1,5, got 0");
    a.root = 5;
    CHECK_OK(CheckRequestsMatch({a, a}, {1, 5}));
  }
}

TEST(reductions_and_factors_must_agree_for_every_reducing_kind) {
  for (CollectiveKind kind : kReducing) {
    RequestInfo other = Valid(kind);
    other.op = ReduceOp::kMax;
    CheckMismatch(CheckRequestsMatch({Valid(kind), other}), "the reduction", "rank 1: max");
    other = Valid(kind);
    other.prescale = 0.25;
    CheckMismatch(CheckRequestsMatch({Valid(kind), other}), "the factors", "rank 1: prescale 0.25");
  }
}

// As many bytes on all ranks, but of other gradients.
TEST(buckets_must_be_made_of_the_same_tensors_in_the_same_order) {
  RequestInfo bucket = Make(CollectiveKind::kAllreduce, {8});
  bucket.bucket = true;
  bucket.sizes = {4, 4};
  bucket.hints = {0, 1};
  CHECK_OK(CheckRequestsMatch({bucket, bucket}));
  RequestInfo other = bucket;
  other.hints = {1, 0};
  CheckMismatch(CheckRequestsMatch({bucket, other}), "the tensors of the bucket",
                "rank 1: 2 tensors");
  other = bucket;
  other.sizes = {5, 3};
  CheckMismatch(CheckRequestsMatch({bucket, other}), "the tensors of the bucket",
                "rank 1: 2 tensors");
}

// Slices are cut by the places of the tensors in the list, so other places give other results.
TEST(lists_must_have_the_same_tensors_at_the_same_places) {
  RequestInfo list = Make(CollectiveKind::kAllreduce, {3});
  list.shapes = {{3}, {3}};
  list.sizes = {3, 3};
  list.hints = {0, 2};
  CHECK_OK(CheckRequestsMatch({list, list}));
  RequestInfo other = list;
  other.hints = {0, 1};
  CheckMismatch(CheckRequestsMatch({list, other}), "the order of the tensors",
                "rank 0: elements [0,2] of the list; rank 1: elements [0,1] of the list");
}

// Also on the last of the ranks, and where all else is alike.
TEST(allreduces_must_agree_on_what_else_decides_how_they_run) {
  const RequestInfo alike = Valid(CollectiveKind::kAllreduce);
  const auto check = [&](const RequestInfo& other, const char* what, const char* values) {
    CheckMismatch(CheckRequestsMatch({alike, alike, other}), what, values);
    CheckMismatch(CheckRequestsMatch({other, alike, alike}), what, values);
  };
  RequestInfo other = alike;
  other.postscale = 2;
  check(other, "the factors", "postscale 2");
  other = alike;
  other.algorithm = "ring";
  check(other, "the algorithm", "ring");
  other = alike;
  other.predicted = PredictedTicket(5, 2, 7);
  check(other, "which step of which group", "submission 7 of bucket 2 of group 5");
  other = alike;
  other.timeout_s = 1;
  other.repeats = true;
  CHECK_OK(CheckRequestsMatch({alike, other, alike}));
}

TEST(splits_of_a_reduce_scatter_must_agree_and_the_default_counts_as_its_numbers) {
  const auto kind = CollectiveKind::kReduceScatter;
  CHECK_OK(CheckRequestsMatch({Make(kind, {7}), Make(kind, {7}, {3, 2, 2}), Make(kind, {7})}));
  CheckMismatch(CheckRequestsMatch({Make(kind, {7}), Make(kind, {7}, {2, 3, 2}), Make(kind, {7})}),
                "the splits", "ranks 0,2: [3,2,2]; rank 1: [2,3,2]");
}

TEST(splits_of_an_alltoall_may_differ) {
  const auto kind = CollectiveKind::kAlltoall;
  CHECK_OK(CheckRequestsMatch({Make(kind, {4}), Make(kind, {3}, {3, 0})}));
}

TEST(splits_that_do_not_fit_to_the_tensor_name_the_rank_and_the_numbers) {
  struct Case {
    std::vector<int64_t> splits;
    const char* text;
  };
  const std::vector<Case> cases = {
      {{1, 2, 2}, "splits [1,2,2] sum to 5, its tensor has 6 rows"},
      {{3, 3, 3}, "splits [3,3,3] sum to more than its rows: its tensor has 6 rows"},
      {{7, -1, 0}, "splits [7,-1,0] sum to more"},
      {{6, -1, 1}, "splits [6,-1,1] have a negative number"},
      {{INT64_MAX, INT64_MAX, 8}, "sum to more than its rows"},
      {{3, 3}, "splits [3,3] have length 2, expected 3, one for each rank"},
      {{2, 2, 2, 0}, "have length 4, expected 3"},
  };
  for (CollectiveKind kind :
       {CollectiveKind::kReduceScatter, CollectiveKind::kScatter, CollectiveKind::kAlltoall}) {
    for (const Case& c : cases) {
      RequestInfo good = Make(kind, {6, 4});
      RequestInfo bad = Make(kind, {6, 4}, c.splits);
      good.root = bad.root = 1;
      const Status status = CheckRequestsMatch({good, bad, good});
      CheckInvalid(status, "not valid: rank 1: splits [");
      CHECK_CONTAINS(status.message(), c.text);
      CHECK_CONTAINS(status.payload(), "\"rank\": 1");
    }
  }
}

TEST(only_the_splits_of_the_root_count_in_a_scatter) {
  RequestInfo root = Make(CollectiveKind::kScatter, {6}, {1, 5});
  RequestInfo other = Make(CollectiveKind::kScatter, {0}, {9, 9, 9});
  root.root = other.root = 4;
  CHECK_OK(CheckRequestsMatch({other, root}, {2, 4}));
}

TEST(an_alltoall_without_splits_needs_equal_parts) {
  const auto kind = CollectiveKind::kAlltoall;
  CHECK_OK(CheckRequestsMatch({Make(kind, {6}), Make(kind, {0}), Make(kind, {3})}));
  CheckInvalid(CheckRequestsMatch({Make(kind, {6}), Make(kind, {5}), Make(kind, {0})}),
               "rank 1: its tensor has 5 rows, which can't be cut into 3 equal parts");
}

TEST(rows_that_are_too_many_together_are_refused) {
  for (CollectiveKind kind :
       {CollectiveKind::kAllgather, CollectiveKind::kGather, CollectiveKind::kAlltoall}) {
    const int64_t many = int64_t{1} << 62;
    CheckInvalid(CheckRequestsMatch({Make(kind, {many, 0}), Make(kind, {many, 0})}),
                 "ranks 0,1: 4611686018427387904");
  }
}

TEST(two_that_both_send_or_both_receive_are_told_so) {
  CHECK_OK(CheckRequestsMatch({Pair(0, 1), Pair(0, 1)}));
  CHECK_OK(CheckRequestsMatch({Pair(6, 3), Pair(6, 3)}, {3, 6}));
  CheckMismatch(CheckRequestsMatch({Pair(3, 6), Pair(6, 3)}, {3, 6}), "who sends",
                "rank 3: from 3 to 6; rank 6: from 6 to 3");
}

TEST(registered_groups_report_the_first_difference) {
  const Status error = CheckRequestsMatch({Register("a float32 [2]\nb float32 [3]\nop=average"),
                                           Register("a float32 [2]\nb float32 [4]\nop=average")});
  CheckMismatch(error, "the list of gradients", "entry 1");
  CHECK_CONTAINS(error.message(), "rank 1: \"b float32 [4]\"");
}

TEST(ranks_are_named_by_their_number_in_the_world) {
  const Status status = CheckRequestsMatch(
      {Make(CollectiveKind::kAllreduce, {2}), Make(CollectiveKind::kAllreduce, {3}),
       Make(CollectiveKind::kAllreduce, {2})},
      {1, 4, 7});
  CheckMismatch(status, "the shape", "ranks 1,7: [2]; rank 4: [3]");
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
