// Complete runtimes above TFDIST_MESH_RANKS: collectives, later links, failure, goodbyes.
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "transport/routes.h"

namespace tfdist {
namespace {

constexpr int kSize = 24;

Config SparseConfig() {
  Config config = TestConfig();
  config.mesh_ranks = 4;
  config.shm_slots = 2;
  return config;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void CheckAllreduce(Ranks& ranks, const std::string& name, int64_t elements) {
  ranks.Each([&](int rank) {
    std::vector<float> data(static_cast<size_t>(elements), static_cast<float>(rank + 1));
    CHECK_OK(StartAllreduce(ranks[rank], name, data.data(), data.data(), elements).Wait());
    const int n = ranks.size();
    CHECK(data == std::vector<float>(data.size(), static_cast<float>(n * (n + 1) / 2)));
  });
}

void CheckBroadcast(Ranks& ranks, int root) {
  ranks.Each([&](int rank) {
    std::vector<float> data(3000, static_cast<float>(rank));
    auto request =
        MakeRequest(CollectiveKind::kBroadcast, "b" + std::to_string(root), DType::kFloat32);
    request->info.root = root;
    AddTensor(request.get(), data.data(), data.data(), {3000});
    CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
    CHECK(data == std::vector<float>(3000, static_cast<float>(root)));
  });
}

void CheckAllgather(Ranks& ranks) {
  ranks.Each([&](int rank) {
    const int64_t rows = 1 + rank % 3;
    std::vector<int32_t> mine(static_cast<size_t>(rows), rank);
    std::vector<int32_t> all;
    auto request = MakeRequest(CollectiveKind::kAllgather, "g", DType::kInt32);
    AddTensor(request.get(), mine.data(), nullptr, {rows});
    request->allocate = [&all](const std::vector<int64_t>& counts, auto...) -> void* {
      int64_t total = 0;
      for (int64_t count : counts) total += count;
      all.resize(static_cast<size_t>(total));
      return all.data();
    };
    CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
    std::vector<int32_t> expected;
    for (int r = 0; r < ranks.size(); ++r) expected.insert(expected.end(), 1 + r % 3, r);
    CHECK(all == expected);
  });
}

TEST(collectives_whose_partners_are_neighbours_open_no_link) {
  for (const char* transport : {"inproc", "shm"}) {
    Ranks ranks(kSize, transport, SparseConfig());
    for (int round = 0; round < 5; ++round) {
      ranks.Each([&](int rank) {
        CHECK_OK(Start(ranks[rank], MakeRequest(CollectiveKind::kBarrier, "all")).Wait());
      });
    }
    CheckAllreduce(ranks, "small", 7);
    CheckAllreduce(ranks, "large", 20000);
    CheckBroadcast(ranks, 0);
    CheckBroadcast(ranks, 13);
    CheckAllgather(ranks);
    CHECK_EQ(ranks.opened(), 0u);
  }
}

TEST(other_collectives_open_the_links_that_they_need) {
  for (const char* transport : {"inproc", "shm", "tcp"}) {
    Config config = SparseConfig();
    config.allreduce_algorithm = "pairwise";
    Ranks ranks(kSize, transport, config);
    CheckAllreduce(ranks, "pairwise", 5000);
    const size_t pairs = kSize * (kSize - 1) / 2;
    const size_t first = kSize * OverlayNeighbours(0, kSize).size() / 2;
    CHECK_EQ(ranks.opened(), pairs - first);
    CheckAllreduce(ranks, "again", 5000);
    CHECK_EQ(ranks.opened(), pairs - first);
  }
}

// At most `most` steps, or until an error, which it returns.
Status RunSteps(Runtime& runtime, int most) {
  for (int step = 0; step < most; ++step) {
    std::vector<float> data(2000, 1.0f);
    TFDIST_RETURN_IF_ERROR(StartAllreduce(runtime, "w", data.data(), data.data(), 2000).Wait());
  }
  return Status();
}

TEST(every_rank_names_the_rank_that_dies_leader_relay_or_leaf) {
  for (int victim : {0, 8, 13, 23}) {
    Ranks ranks(kSize, "shm", SparseConfig());
    CheckAllreduce(ranks, "before", 100);
    ranks.Each([&](int rank) {
      if (rank == victim) {
        CHECK_OK(RunSteps(ranks[rank], 3));
        ranks.Kill(victim);
        return;
      }
      const int64_t begin = NowUs();
      const Status status = RunSteps(ranks[rank], 1 << 20);
      CHECK(status.code() == Code::kAborted);
      CHECK_EQ_IN(Contains(status.message(), "rank " + std::to_string(victim) + " "), true,
                  status.message());
      CHECK(NowUs() - begin < 12000000);
    });
  }
}

TEST(a_rank_that_fails_by_itself_ends_the_work_of_all) {
  Ranks ranks(kSize, "inproc", SparseConfig());
  CheckAllreduce(ranks, "before", 100);
  ranks.Each([&](int rank) {
    if (rank == 11) {
      CHECK_OK(RunSteps(ranks[rank], 3));
      ranks[rank].Abort({"a long story: " + std::string(2000, 'x'), "", -1});
      return;
    }
    const Status status = RunSteps(ranks[rank], 1 << 20);
    CHECK_EQ_IN(Contains(status.message(), "rank 11 "), true, status.message());
    CHECK_EQ_IN(Contains(status.message(), "a long story"), true, status.message());
  });
}

TEST(goodbyes_one_after_the_other_disturb_nobody) {
  Ranks ranks(kSize, "shm", SparseConfig());
  CheckAllreduce(ranks, "before", 100);
  // All but the leader and one far from it leave; these two can still agree while a way is left.
  for (int rank = 1; rank < 12; ++rank) ranks[rank].Shutdown(5);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (int rank : {0, 12, 17, 23}) CHECK_OK(ranks[rank].failure());
  const int64_t begin = NowUs();
  ranks.Each([&](int rank) { ranks[rank].Shutdown(5); });
  CHECK(NowUs() - begin < 4000000);
}

TEST(a_mismatch_is_an_error_on_every_rank_and_the_world_goes_on) {
  Ranks ranks(kSize, "inproc", SparseConfig());
  ranks.Each([&](int rank) {
    std::vector<float> data(8);
    const int64_t elements = rank == 19 ? 7 : 8;
    const Status status =
        StartAllreduce(ranks[rank], "w", data.data(), data.data(), elements).Wait();
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_EQ_IN(Contains(status.message(), "rank 19: [7]"), true, status.message());
  });
  CheckAllreduce(ranks, "after", 100);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
