// The commit gate in the engine: a step of gradients ends on all ranks or on none.
#include <set>

#include "buckets.h"
#include "check.h"
#include "hand_driven.h"

namespace tfdist {
namespace {

constexpr int kBuckets = 2;

Config Gated() {
  Config config = TestConfig();
  config.atomic_steps = 1;
  config.allreduce_algorithm = "pairwise";  // of a small tensor: rank 0 adds up and tells
  return config;
}

// Ranks that make steps of two buckets.
struct Training {
  explicit Training(int size) : world(size, Gated()), data(static_cast<size_t>(size)) {
    for (auto& rank : data) rank.assign(kBuckets, std::vector<float>(100, 1.0f));
    world.Register("g");
  }
  void Submit(int rank, int bucket) {
    auto& own = data[static_cast<size_t>(rank)][static_cast<size_t>(bucket)];
    done[{rank, bucket}] = world.Bucket(rank, "g", bucket, kBuckets, &own);
  }
  void SubmitAll() {
    for (int r = 0; r < world.size(); ++r) {
      for (int b = 0; b < kBuckets; ++b) Submit(r, b);
    }
  }
  void Step() {
    SubmitAll();
    world.Settle();
    for (const auto& [key, one] : done) CHECK_EQ(TextOf(one), "ok");
  }
  std::string State(int rank, int bucket) { return TextOf(done.at({rank, bucket})); }

  HandDriven world;
  std::vector<std::vector<std::vector<float>>> data;
  std::map<std::pair<int, int>, Done> done;
};

TEST(a_step_costs_two_messages_for_each_rank_but_the_leader) {
  Training training(4);
  training.Step();
  std::vector<int64_t> before;
  const auto sent = [&](int rank) {
    return Counter(training.world[rank].CountersJson(), "gate_messages");
  };
  for (int r = 0; r < 4; ++r) before.push_back(sent(r));
  for (int step = 0; step < 5; ++step) training.Step();
  CHECK_EQ(sent(0) - before[0], int64_t{5 * 3});
  for (int r = 1; r < 4; ++r) CHECK_EQ(sent(r) - before[static_cast<size_t>(r)], int64_t{5});
}

TEST(a_bucket_is_held_until_its_step_is_whole) {
  Training training(3);
  training.Step();
  for (int r = 0; r < 3; ++r) training.Submit(r, 0);
  training.world.Settle();
  for (int r = 0; r < 3; ++r) CHECK_EQ(training.State(r, 0), "under way");
  for (int r = 0; r < 2; ++r) training.Submit(r, 1);
  training.world.Settle();
  for (int r = 0; r < 3; ++r) CHECK_EQ(training.State(r, 0), "under way");
  training.Submit(2, 1);
  training.world.Settle();
  for (const auto& [key, one] : training.done) CHECK_EQ(TextOf(one), "ok");
}

// The instant of the death runs through all turns of a step; the others then all have the step, or
// none has, and say the same.
TEST(whenever_a_rank_dies_the_survivors_have_the_same_steps) {
  std::set<std::string> seen;
  for (int victim : {0, 1, 3}) {
    for (int order = 0; order < 4; ++order) {
      for (int instant = 0; instant < 48; ++instant) {
        Training training(4);
        training.Step();
        training.SubmitAll();
        for (int i = 0; i < instant; ++i) training.world.Poll((i * (2 * order + 1) + order) % 4);
        training.world.Kill(victim);
        training.world.Settle();
        std::set<std::string> ends;
        std::set<std::string> failures;
        for (int r = 0; r < 4; ++r) {
          if (r == victim) continue;
          for (int b = 0; b < kBuckets; ++b) ends.insert(training.State(r, b));
          failures.insert(training.world[r].failure().payload());
        }
        const std::string where = "victim " + std::to_string(victim) + ", order " +
                                  std::to_string(order) + ", turn " + std::to_string(instant);
        CHECK_EQ_IN(ends.size(), size_t{1}, where);
        CHECK_EQ_IN(failures.size(), size_t{1}, where);
        CHECK_EQ_IN(ends.count("under way"), size_t{0}, where);
        const bool applied = *ends.begin() == "ok";
        CHECK_CONTAINS(*failures.begin(),
                       std::string("\"committed_step\": ") + (applied ? "2" : "1"));
        seen.insert(applied ? "applied" : "not applied");
      }
    }
  }
  CHECK_EQ(seen.size(), size_t{2});
}

TEST(a_bucket_of_the_next_step_waits_for_its_turn) {
  Training training(3);
  training.Step();
  std::vector<std::vector<float>> early(3, std::vector<float>(100, 5.0f));
  std::vector<Done> next;
  for (int r = 0; r < 3; ++r) {
    training.Submit(r, 0);
    // Its second bucket in a row is of the next step, and does not make this one whole.
    next.push_back(training.world.Bucket(r, "g", 0, kBuckets, &early[static_cast<size_t>(r)]));
  }
  training.world.Settle();
  for (int r = 0; r < 3; ++r) CHECK_EQ(training.State(r, 0), "under way");
  for (int r = 0; r < 3; ++r) training.Submit(r, 1);
  training.world.Settle();
  for (const auto& [key, one] : training.done) CHECK_EQ(TextOf(one), "ok");
  for (const Done& one : next) CHECK_EQ(TextOf(one), "under way");
  for (int r = 0; r < 3; ++r) training.Submit(r, 1);
  training.world.Settle();
  for (const Done& one : next) CHECK_EQ(TextOf(one), "ok");
  CHECK(early[1] == std::vector<float>(100, 15.0f));
}

TEST(a_mismatch_fails_the_whole_step_on_every_rank_and_the_next_one_works) {
  Training training(3);
  training.data[1][1].resize(99);
  training.SubmitAll();
  training.world.Settle();
  for (int r = 0; r < 3; ++r) {
    for (int b = 0; b < kBuckets; ++b) CHECK_CONTAINS(training.State(r, b), "[99]");
    CHECK_OK(training.world[r].failure());
  }
  training.data[1][1].assign(100, 1.0f);
  training.Step();
}

TEST(a_step_that_never_gets_whole_has_a_deadline_that_says_why) {
  Training training(3);
  for (int r = 0; r < 3; ++r) training.Submit(r, 0);
  training.world.Pass(16 * 1000 * 1000);
  for (int r = 0; r < 3; ++r) {
    CHECK_CONTAINS(training.State(r, 0), "1 of its 2 buckets were submitted here");
  }
}

// Rank 2 has given its data, but does not read the sum.
TEST(a_rank_that_does_not_complete_is_named) {
  Training training(3);
  for (auto& rank : training.data) rank.assign(kBuckets, std::vector<float>(1, 1.0f));
  training.world.data_open[2] = false;
  training.SubmitAll();
  training.world.Pass(16 * 1000 * 1000);
  CHECK_CONTAINS(training.State(0, 0), "rank 2");
  CHECK_CONTAINS(training.State(0, 0), "timeout");
  CHECK_EQ(training.State(1, 0), training.State(0, 0));
  CHECK_EQ(training.State(2, 0), training.State(0, 0));
}

TEST(a_group_without_a_number_is_refused) {
  HandDriven world(2, Gated());
  std::vector<float> data(10);
  CHECK_CONTAINS(TextOf(world.Bucket(0, "unknown", 0, 1, &data)), "TFDIST_ATOMIC_STEPS=1 needs");
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
