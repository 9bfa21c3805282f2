// The routes of the overlay: who is a neighbour of whom, and where a message goes next.
#include "transport/routes.h"

#include <algorithm>
#include <random>

#include "check.h"

namespace tfdist {
namespace {

// 2^bits >= size
int Bits(int size) {
  int bits = 0;
  while ((1 << bits) < size) ++bits;
  return bits;
}

bool Has(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

TEST(a_rank_has_at_most_two_neighbours_for_each_bit_and_they_are_mutual) {
  for (int size = 2; size <= 300; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      const std::vector<int> neighbours = OverlayNeighbours(rank, size);
      CHECK(static_cast<int>(neighbours.size()) <= 2 * Bits(size));
      CHECK(std::is_sorted(neighbours.begin(), neighbours.end()));
      CHECK(!Has(neighbours, rank));
      for (int neighbour : neighbours) CHECK(Has(OverlayNeighbours(neighbour, size), rank));
    }
  }
  CHECK_EQ(OverlayNeighbours(0, 256).size(), 15u);  // 2 log2(256) - 1: +128 is -128
  CHECK_EQ(OverlayNeighbours(0, 4096).size(), 23u);
}

TEST(partners_of_rings_trees_butterflies_and_dissemination_are_neighbours) {
  for (int size : {2, 3, 7, 19, 24, 64, 100}) {
    for (int rank = 0; rank < size; ++rank) {
      const std::vector<int> neighbours = OverlayNeighbours(rank, size);
      for (int jump = 1; jump < size; jump *= 2) {
        CHECK(Has(neighbours, (rank + jump) % size));
        if ((rank ^ jump) < size) CHECK(Has(neighbours, rank ^ jump));
      }
    }
  }
}

TEST(every_pair_reaches_in_at_most_log2_hops) {
  for (int size : {2, 3, 5, 17, 24, 32, 100, 255, 256, 1000}) {
    std::vector<std::vector<int>> neighbours;
    for (int rank = 0; rank < size; ++rank) neighbours.push_back(OverlayNeighbours(rank, size));
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        int hops = 0;
        for (int at = from; at != to; ++hops) {
          at = NextHop(at, to, size, neighbours[static_cast<size_t>(at)]);
          CHECK(at >= 0);
          CHECK(hops < Bits(size));
        }
      }
    }
  }
}

TEST(every_hop_is_nearer_whatever_each_rank_believes_to_be_usable) {
  std::mt19937 random(7);
  const int size = 64;
  for (int trial = 0; trial < 20000; ++trial) {
    const int from = static_cast<int>(random() % size);
    const int to = static_cast<int>(random() % size);
    std::vector<int> usable = OverlayNeighbours(from, size);
    std::shuffle(usable.begin(), usable.end(), random);
    usable.resize(random() % (usable.size() + 1));
    const int next = NextHop(from, to, size, usable);
    if (next >= 0) CHECK(RingDistance(next, to, size) < RingDistance(from, to, size));
    if (from != to && Has(usable, to)) CHECK_EQ(next, to);
  }
}

TEST(one_dead_rank_cuts_off_nobody_else) {
  for (int size : {5, 17, 24, 100}) {
    for (int dead = 0; dead < size; ++dead) {
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          if (from == dead || to == dead) continue;
          int hops = 0;
          for (int at = from; at != to; ++hops) {
            std::vector<int> usable = OverlayNeighbours(at, size);
            usable.erase(std::remove(usable.begin(), usable.end(), dead), usable.end());
            at = NextHop(at, to, size, usable);
            CHECK(at >= 0);
            CHECK(hops < 2 * Bits(size));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
