// TFDIST_RING_ORDER: which orders there are, what crosses between hosts, and that every algorithm
// that sends round a ring is right, and has its bits, in any order.
#include "collective/ring_order.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "settings.h"

namespace tfdist {
namespace {

TEST(orders_are_checked) {
  for (const char* good : {"topology", "rank", "0,1,2,3", "3,1,0,2"}) {
    CHECK_OK(CheckRingOrder(good, 4));
  }
  CHECK_OK(CheckRingOrder("0", 1));
  for (const char* bad : {"", "0,1,2", "0,1,2,2", "0,1,2,4", "0,1,2,3,", ",0,1,2,3", "0 1 2 3",
                          "0,1,-1,2", "0,1,2,3,4", "Rank", "0,1,2,99999999999"}) {
    const Status status = CheckRingOrder(bad, 4);
    CHECK_EQ_IN(static_cast<int>(status.code()), static_cast<int>(Code::kInvalidArgument), bad);
    CHECK_EQ(status.message(),
             "TFDIST_RING_ORDER: expected topology, rank, or each of the ranks 0 to 3 once, such "
             "as 0,2,1,3 for a world of four; got \"" +
                 std::string(bad) + "\"");
  }
}

TEST(topology_puts_the_ranks_of_a_host_side_by_side) {
  using Order = std::vector<int32_t>;
  const Order world = {0, 1, 2, 3};
  CHECK(RingOrder("topology", world, {0, 1, 0, 1}) == (Order{0, 2, 1, 3}));
  CHECK(RingOrder("topology", world, {7, 3, 3, 7}) == (Order{0, 3, 1, 2}));
  CHECK(RingOrder("rank", world, {0, 1, 0, 1}).empty());
  // Numbered host by host: nothing to do.
  CHECK(RingOrder("topology", world, {0, 0, 1, 1}).empty());
  CHECK(RingOrder("topology", world, {}).empty());
}

TEST(a_set_keeps_the_order_of_the_world) {
  using Order = std::vector<int32_t>;
  CHECK(RingOrder("4,0,3,1,2", {0, 1, 2, 3, 4}, {}) == (Order{4, 0, 3, 1, 2}));
  CHECK(RingOrder("4,0,3,1,2", {0, 2, 4}, {}) == (Order{2, 0, 1}));  // 4, 0, 2 as indices
}

// Messages between hosts when each rank sends one slice a hop.
int Crossings(const AlgorithmEntry& entry, ScheduleArgs args) {
  int crossings = 0;
  for (args.rank = 0; args.rank < args.size; ++args.rank) {
    const auto own = static_cast<size_t>(args.rank);
    for (const Step& step : entry.make(args).steps) {
      if (step.kind != StepKind::kSend) continue;
      crossings += args.host_of[own] != args.host_of[static_cast<size_t>(step.peers[0])];
    }
  }
  return crossings;
}

TEST(a_ring_by_topology_crosses_into_each_host_once) {
  std::mt19937 random(7);
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (std::string(entry.name) != "ring") continue;
    for (int size = 2; size <= 12; ++size) {
      for (int turn = 0; turn < 20; ++turn) {
        ScheduleArgs args;
        args.size = size;
        std::vector<int32_t> all;
        for (int32_t rank = 0; rank < size; ++rank) {
          all.push_back(rank);
          args.host_of.push_back(static_cast<int32_t>(random() % 4));
        }
        const int hops = entry.kind == CollectiveKind::kAllreduce ? 2 * (size - 1) : size - 1;
        const auto hosts = static_cast<int>(RanksByHost(args).size());
        args.ring = RingOrder("topology", all, args.host_of);
        CHECK_EQ(Crossings(entry, args), hosts == 1 ? 0 : hops * hosts);
        args.ring.clear();
        int borders = 0;
        for (size_t r = 0; r < all.size(); ++r) {
          borders += args.host_of[r] != args.host_of[(r + 1) % all.size()];
        }
        CHECK_EQ(Crossings(entry, args), hops * borders);
      }
    }
  }
}

// A list of the set's ranks in random order, as RankOf numbers them.
std::string Shuffled(const Setting& s, std::mt19937* random, std::vector<int32_t>* order) {
  order->clear();
  for (int32_t i = 0; i < s.size; ++i) order->push_back(i);
  std::shuffle(order->begin(), order->end(), *random);
  std::string text;
  for (int32_t i : *order) text += (text.empty() ? "" : ",") + std::to_string(s.RankOf(i));
  return text;
}

TEST(every_algorithm_is_right_in_any_order) {
  std::mt19937 random(3);
  for (CollectiveKind kind :
       {CollectiveKind::kAllreduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllgather}) {
    ForEachRow(kind, [&](Setting s) {
      std::vector<int32_t> order;
      for (DType dtype : {DType::kFloat32, DType::kBfloat16}) {
        s.dtype = dtype;
        s.ring_order = Shuffled(s, &random, &order);
        s.lengths = {3 * 16 * s.size + 5, 1, 0, 130};
        s.rows = RaggedRows(s.size, 40, 1);
        s.in_place = random() % 2 == 0;
        s.read_late = random() % 2 == 0;
        s.seed = random();
        Planned(s).Run().Expect();
      }
    });
  }
}

// The place in the ring is what counts, not the number: a world that is numbered badly has the bits
// that it would have if it were numbered in the order of the ring.
TEST(the_bits_are_those_of_a_world_numbered_in_that_order) {
  std::mt19937 random(5);
  for (const char* name : {"ring", "torus"}) {
    ForEachRow(CollectiveKind::kAllreduce, [&](Setting s) {
      if (std::string(s.entry->name) != name || s.size < 3) return;
      s.lengths = {700, 5};
      s.value = Rough;
      std::vector<int32_t> order;
      Setting shuffled = s;
      shuffled.ring_order = Shuffled(s, &random, &order);
      std::vector<int> place(order.size());
      for (size_t p = 0; p < order.size(); ++p) {
        place[static_cast<size_t>(order[p])] = static_cast<int>(p);
      }
      shuffled.value = [place](int rank, size_t tensor, int64_t i) {
        return Rough(place[static_cast<size_t>(rank)], tensor, i);
      };
      Planned numbered(s);
      Planned ordered(shuffled);
      numbered.Run();
      ordered.Run();
      for (size_t t = 0; t < s.lengths.size(); ++t) {
        CHECK_EQ_IN(ordered.Output(0, t) == numbered.Output(0, t), true, shuffled.Name());
      }
    });
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
