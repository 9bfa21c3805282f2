// Timeouts of operations: which time counts, and which operations they end.
#include <functional>

#include "buckets.h"
#include "hand_driven.h"

namespace tfdist {
namespace {

constexpr int64_t kSecond = 1000 * 1000;  // operations of HandDriven wait for 15 of them

// Two ranks, and operations that wait for the other rank in different ways.
struct Waits {
  HandDriven ranks{2, TestConfig()};
  std::vector<float> data[2];
  std::vector<std::function<Done(int)>> calls;

  Waits() {
    ranks.Register("w");
    const auto bucket = [this](int r) { return ranks.Bucket(r, "w", 0, 1, &Fresh(r)); };
    const auto allreduce = [this](int r) { return ranks.Allreduce(r, "x", &Fresh(r)); };
    const auto join = [this](int r) {
      auto request = MakeRequest(CollectiveKind::kJoin, "join");
      request->agreed = [](const Response&) {};
      return ranks.Submit(r, std::move(request));
    };
    const Done first[] = {bucket(0), bucket(1)};
    ranks.Settle();
    for (const Done& done : first) CHECK_EQ(TextOf(done), "ok");
    calls = {bucket, allreduce, join};  // the bucket starts without agreement now
  }
  std::vector<float>& Fresh(int rank) {
    data[rank].assign(100, 1.0f);
    return data[rank];
  }
  // All processes are stopped for ten minutes.
  void Suspend() { ranks.now_us += 600 * kSecond; }
};

TEST(a_wait_goes_on_after_the_whole_job_was_suspended) {
  for (int rank : {0, 1}) {
    Waits job;
    for (const auto& call : job.calls) {
      const Done first = call(rank);
      job.ranks.Pass(5 * kSecond);
      job.Suspend();
      job.ranks.Pass(5 * kSecond);
      CHECK_EQ(TextOf(first), "under way");
      const Done second = call(1 - rank);
      job.ranks.Settle();
      CHECK_EQ(TextOf(first), "ok");
      CHECK_EQ(TextOf(second), "ok");
    }
  }
}

TEST(a_timeout_ends_a_wait_in_a_job_that_was_suspended) {
  for (size_t call : {0, 1, 2}) {
    for (int rank : {0, 1}) {
      Waits job;
      const Done done = job.calls[call](rank);
      job.ranks.Pass(5 * kSecond);
      job.Suspend();
      job.ranks.Pass(12 * kSecond);
      CHECK_CONTAINS(TextOf(done),
                     " s for rank " + std::to_string(1 - rank) + "; its timeout has passed");
    }
  }
}

// A slow line: rank 0 reads a few segments a second. The allreduces are in progress together.
TEST(a_timeout_does_not_end_operations_whose_data_are_moving) {
  HandDriven ranks(2, TestConfig());
  std::vector<std::vector<float>> data(4, std::vector<float>(150 * 1024, 1.0f));
  std::vector<Done> done;
  ranks.data_open[0] = false;
  const int64_t begin_us = ranks.now_us;
  for (size_t i = 0; i < data.size(); ++i) {
    done.push_back(ranks.Allreduce(static_cast<int>(i / 2), std::to_string(i % 2), &data[i]));
  }
  while (*done[0] == nullptr || *done[1] == nullptr) {
    ranks.Pass(kSecond);
    ranks.data_open[0] = true;
    ranks.Poll(0);
    ranks.data_open[0] = false;
  }
  ranks.Settle();
  for (const Done& one : done) CHECK_EQ(TextOf(one), "ok");
  CHECK(data == std::vector<std::vector<float>>(4, std::vector<float>(150 * 1024, 2.0f)));
  CHECK(ranks.now_us - begin_us > 20 * kSecond);
}

TEST(a_timeout_ends_operations_whose_data_have_stopped) {
  HandDriven ranks(2, TestConfig());
  std::vector<float> data[2];
  std::vector<Done> done;
  ranks.data_open[0] = false;
  for (int r : {0, 1}) {
    data[r].assign(150 * 1024, 1.0f);
    done.push_back(ranks.Allreduce(r, "x", &data[r]));
  }
  ranks.Pass(14 * kSecond);
  for (const Done& one : done) CHECK_EQ(TextOf(one), "under way");
  ranks.Pass(3 * kSecond);
  for (const Done& one : done) {
    CHECK_CONTAINS(TextOf(one), "did not finish although every rank had started it");
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
