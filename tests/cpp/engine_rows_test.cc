// Collectives whose outputs are allocated when their size is agreed on, and two ranks that talk
// alone, through complete runtimes: what the agreement hands on, and mistakes that end nothing but
// the operation. Values of every algorithm: conformance_test.
#include <numeric>

#include "base/deadline.h"
#include "buckets.h"

namespace tfdist {
namespace {

// One tensor of `rows` numbers 100 * rank, 100 * rank + 1, ..., and the output.
struct Call {
  std::vector<int32_t> in;
  std::vector<int32_t> out;
  std::vector<int64_t> rows_by_rank;
  Pending pending;

  Call(Runtime& runtime, int rank, CollectiveKind kind, int64_t rows,
       std::vector<int64_t> splits = {}, int root = 0, bool has_memory = true) {
    in.resize(static_cast<size_t>(rows));
    std::iota(in.begin(), in.end(), 100 * rank);
    auto request = MakeRequest(kind, "x", DType::kInt32);
    request->info.splits = std::move(splits);
    request->info.root = root;
    AddTensor(request.get(), in.data(), nullptr, {rows});
    request->allocate = [this, has_memory](const std::vector<int64_t>& by_rank,
                                           int64_t total) -> void* {
      rows_by_rank = by_rank;
      out.resize(static_cast<size_t>(total));
      static int32_t nothing;
      if (!has_memory) return nullptr;
      return out.empty() ? &nothing : out.data();
    };
    pending = Start(runtime, std::move(request));
  }
};

void CheckWorks(Ranks& ranks) {
  ranks.Each([&](int rank) {
    std::vector<float> data(100, 1.0f);
    CHECK_OK(StartAllreduce(ranks[rank], "after", data.data(), data.data(), 100).Wait());
    CHECK(data == std::vector<float>(100, static_cast<float>(ranks.size())));
  });
}

TEST(an_alltoall_of_unequal_parts_tells_who_sent_what) {
  for (const TransportEntry& transport : Transports()) {
    Ranks ranks(3, transport.name);
    const std::vector<std::vector<int64_t>> splits = {{1, 0, 2}, {0, 0, 0}, {2, 1, 1}};
    const std::vector<std::vector<int32_t>> expected = {{0, 200, 201}, {202}, {1, 2, 203}};
    ranks.Each([&](int rank) {
      const auto r = static_cast<size_t>(rank);
      const int64_t rows = std::accumulate(splits[r].begin(), splits[r].end(), int64_t{0});
      Call call(ranks[rank], rank, CollectiveKind::kAlltoall, rows, splits[r]);
      CHECK_OK(call.pending.Wait());
      CHECK(call.out == expected[r]);
      CHECK(call.rows_by_rank == std::vector<int64_t>({splits[0][r], splits[1][r], splits[2][r]}));
    });
  }
}

TEST(gather_and_scatter_are_each_others_reverse) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    Call gather(ranks[rank], rank, CollectiveKind::kGather, rank, {}, 2);
    CHECK_OK(gather.pending.Wait());
    CHECK(gather.out ==
          (rank == 2 ? std::vector<int32_t>({100, 200, 201}) : std::vector<int32_t>()));
    CHECK(gather.rows_by_rank == std::vector<int64_t>({0, 1, 2}));
    const int64_t rows = rank == 2 ? 3 : 0;
    Call scatter(ranks[rank], rank, CollectiveKind::kScatter, rows, {0, 1, 2}, 2);
    CHECK_OK(scatter.pending.Wait());
    const std::vector<std::vector<int32_t>> expected = {{}, {200}, {201, 202}};
    CHECK(scatter.out == expected[static_cast<size_t>(rank)]);
  });
}

TEST(a_mistake_of_one_rank_is_an_error_on_every_rank_and_the_world_goes_on) {
  struct Case {
    CollectiveKind kind;
    std::vector<int64_t> splits;  // of rank 1
    int64_t rows;                 // of rank 1
    int root;
    const char* text;
  };
  const std::vector<Case> cases = {
      {CollectiveKind::kAlltoall, {1, 1, 1}, 6, 0, "rank 1: splits [1,1,1] sum to 3"},
      {CollectiveKind::kAlltoall, {}, 5, 0, "rank 1: its tensor has 5 rows"},
      {CollectiveKind::kAlltoall, {8, -1, -1}, 6, 0, "rank 1: splits [8,-1,-1]"},
      {CollectiveKind::kReduceScatter, {6, 0}, 6, 0, "rank 1: splits [6,0] have length 2"},
      {CollectiveKind::kReduceScatter, {6, 0, 0}, 6, 0, "rank 1: [6,0,0]"},
      {CollectiveKind::kScatter, {7, 0, 0}, 6, 1, "rank 1: splits [7,0,0]"},
      {CollectiveKind::kGather, {}, 6, 3, "root must be in [0, 3), got 3"},
  };
  Ranks ranks(3, "shm");
  for (const Case& c : cases) {
    ranks.Each([&](int rank) {
      const int64_t begin = NowUs();
      Call call(ranks[rank], rank, c.kind, rank == 1 ? c.rows : 6,
                rank == 1 ? c.splits : std::vector<int64_t>(), c.root);
      const Status status = call.pending.Wait();
      CHECK(!status.ok());
      CHECK_EQ_IN(Contains(status.message(), c.text), true, status.message());
      CHECK(NowUs() - begin < 5000000);  // the deadline is 15 s
    });
    CheckWorks(ranks);
  }
}

TEST(an_output_without_memory_ends_the_work_of_every_rank) {
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    Call call(ranks[rank], rank, CollectiveKind::kReduceScatter, 4, {}, 0, rank != 1);
    const Status status = call.pending.Wait();
    CHECK(!status.ok());
    if (rank == 1) CHECK(Contains(status.message(), "reduce_scatter \"x\": no memory"));
  });
}

Pending StartPair(Runtime& runtime, std::vector<int32_t>* data, int sender, int receiver) {
  auto request = MakeRequest(CollectiveKind::kSendRecv, "pair", DType::kInt32);
  request->info.root = sender;
  request->info.peer = receiver;
  AddTensor(request.get(), data->data(), data->data(), {static_cast<int64_t>(data->size())});
  return Start(runtime, std::move(request));
}

TEST(two_ranks_talk_without_the_others) {
  Ranks ranks(3, "tcp");
  std::vector<int32_t> sent(5000);
  std::iota(sent.begin(), sent.end(), 1);
  std::vector<int32_t> received(5000);
  const std::vector<int32_t> before = sent;
  Pending a = StartPair(ranks[2], &sent, 2, 1);
  Pending b = StartPair(ranks[1], &received, 2, 1);
  CHECK_OK(a.Wait());
  CHECK_OK(b.Wait());
  CHECK(sent == before && received == before);
  CheckWorks(ranks);
}

TEST(two_ranks_that_do_not_fit_are_told_and_the_world_goes_on) {
  Ranks ranks(3, "shm");
  std::vector<int32_t> sent(4);
  std::vector<int32_t> received(5);
  Pending a = StartPair(ranks[0], &sent, 0, 2);
  Pending b = StartPair(ranks[2], &received, 0, 2);
  for (Pending* p : {&a, &b}) {
    const Status status = p->Wait();
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_EQ_IN(Contains(status.message(), "rank 0: [4]; rank 2: [5]"), true, status.message());
  }
  a = StartPair(ranks[0], &sent, 0, 2);
  b = StartPair(ranks[2], &sent, 2, 0);  // both send
  for (Pending* p : {&a, &b}) {
    const Status status = p->Wait();
    CHECK_EQ_IN(Contains(status.message(), "who sends"), true, status.message());
  }
  CheckWorks(ranks);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
