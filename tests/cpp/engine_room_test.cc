// Memory that ranks of a host share: a rank's inputs leave room there for its results, and large
// operations for each other.
#include "hand_driven.h"

namespace tfdist {
namespace {

// An allreduce of 16 segments a rank, pairwise: each rank sends its input of every slice to who
// reduces it, and the result of its own slice to all.
struct Allreduced {
  Allreduced(int size, const std::string& transport) : ranks(size, Wide(), nullptr, transport) {
    for (int r = 0; r < size; ++r) {
      data.emplace_back(static_cast<size_t>(size) * 16 * 1024, static_cast<float>(r + 1));
    }
  }
  static Config Wide() {
    Config config = TestConfig();
    config.allreduce_algorithm = "pairwise";
    config.shm_slots = 6;
    return config;
  }
  void Call() {
    for (int r = 0; r < ranks.size(); ++r) {
      done.push_back(ranks.Allreduce(r, "all", &data[static_cast<size_t>(r)]));
    }
  }
  uint64_t Sent(int from, int to) {
    return ranks[from].links()[static_cast<size_t>(to)]->data_frames_sent();
  }
  void ExpectRight() {
    const auto sum = static_cast<float>(ranks.size() * (ranks.size() + 1) / 2);
    for (size_t r = 0; r < data.size(); ++r) {
      CHECK_EQ(TextOf(done[r]), "ok");
      CHECK(data[r] == std::vector<float>(data[r].size(), sum));
    }
  }

  HandDriven ranks;
  std::vector<std::vector<float>> data;
  std::vector<Done> done;
};

TEST(a_rank_that_cannot_reduce_sends_two_segments_of_each_input) {
  for (int size : {2, 3, 4}) {
    Allreduced all(size, "shm");
    all.ranks.data_open[0] = false;
    all.Call();
    all.ranks.Settle(40);
    for (int peer = 1; peer < size; ++peer) CHECK_EQ(all.Sent(0, peer), uint64_t{2});
    all.ranks.data_open[0] = true;
    all.ranks.Settle(200);
    all.ExpectRight();
  }
}

// Links with memory of their own each take no room from one another.
TEST(where_no_memory_is_shared_all_inputs_go) {
  Allreduced all(2, "inproc");
  all.ranks.data_open[0] = false;
  all.Call();
  all.ranks.Settle(40);
  CHECK(all.Sent(0, 1) > uint64_t{2});
  all.ranks.data_open[0] = true;
  all.ranks.Settle(200);
  all.ExpectRight();
}

// Two allreduces of `bytes` at once, of which rank 0 receives nothing for `turns` turns of 10 us.
// How many segments of inputs, of both, it has sent by then, as parts of those of one.
double SentOfInputs(int64_t bytes, int turns, const std::vector<int32_t>& host_of) {
  Config config = TestConfig();
  config.allreduce_algorithm = "pairwise";
  config.segment_bytes = 128 << 10;
  config.shm_slots = 256;
  config.fusion_bytes = 1;
  HandDriven ranks(2, config, nullptr, "inproc", host_of);
  const auto elements = static_cast<size_t>(bytes / 4);
  std::vector<float> data[2][2];
  std::vector<Done> done;
  ranks.data_open[0] = false;
  for (int r = 0; r < 2; ++r) {
    for (int call = 0; call < 2; ++call) {
      data[r][call].assign(elements, static_cast<float>(r + 1));
      done.push_back(ranks.Allreduce(r, std::to_string(call), &data[r][call]));
    }
  }
  ranks.Settle(turns / 2);
  const auto sent = static_cast<double>(ranks[0].links()[1]->data_frames_sent());
  ranks.data_open[0] = true;
  ranks.Settle(200);
  for (size_t i = 0; i < done.size(); ++i) {
    CHECK_EQ(TextOf(done[i]), "ok");
    CHECK(data[i / 2][i % 2] == std::vector<float>(elements, 3.0f));
  }
  return sent / (static_cast<double>(bytes) / 2 / static_cast<double>(config.segment_bytes));
}

TEST(inside_a_host_a_large_operation_runs_alone) {
  CHECK_EQ(SentOfInputs(8 << 20, 40, {}), 1.0);
  CHECK_EQ(SentOfInputs(2 << 20, 40, {}), 2.0);
  CHECK_EQ(SentOfInputs(8 << 20, 40, {0, 1}), 2.0);
}

// Rank 2 is late: what rank 1 sends for the four buckets fills its lane to rank 0.
TEST(copied_operations_are_forgotten_when_they_end) {
  Config config = TestConfig();
  config.allreduce_algorithm = "pairwise";
  config.shm_slots = 2;
  HandDriven ranks(3, config, nullptr, "shm");
  ranks.Register("w");
  std::vector<std::vector<float>> data(12);
  std::vector<Done> done;
  const auto submit = [&](int rank) {
    for (int bucket = 0; bucket < 4; ++bucket) {
      auto& own = data[static_cast<size_t>(4 * rank + bucket)];
      own.assign(600, 1.0f);
      done.push_back(ranks.Bucket(rank, "w", bucket, 4, &own));
    }
  };
  for (int rank : {0, 1, 2}) submit(rank);
  ranks.Settle(40);
  for (int rank : {0, 1}) submit(rank);
  ranks.Settle(400);
  CHECK(ranks[0].copied() > 0);
  submit(2);
  ranks.Settle(40);
  for (const Done& one : done) CHECK_EQ(TextOf(one), "ok");
  for (int rank : {0, 1, 2}) CHECK_EQ(ranks[rank].copied(), size_t{0});
}

TEST(one_that_stands_still_keeps_no_other_out) { CHECK_EQ(SentOfInputs(8 << 20, 400, {}), 2.0); }

}  // namespace
}  // namespace tfdist

TEST_MAIN()
