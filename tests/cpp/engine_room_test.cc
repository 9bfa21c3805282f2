// Links that send from one memory: a rank's inputs leave room there for its results.
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

}  // namespace
}  // namespace tfdist

TEST_MAIN()
