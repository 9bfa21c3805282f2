// The overlay: relaying, order, loss, goodbyes, links that open later. All ranks in one thread.
#include "transport/overlay.h"

#include <algorithm>
#include <random>

#include "overlay_world.h"

namespace tfdist {
namespace {

std::string Numbered(int from, int to, int number) {
  return std::to_string(from) + ">" + std::to_string(to) + " " + std::to_string(number);
}

void CheckOrder(OverlayWorld& world, int from, int to, int count) {
  const std::vector<std::string>& heard = world.heard[{from, to}];
  CHECK_EQ(heard.size(), static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    CHECK_EQ(heard[static_cast<size_t>(i)], Numbered(from, to, i));
  }
}

TEST(every_pair_hears_every_message_once_and_in_order) {
  for (const char* transport : {"inproc", "shm"}) {
    OverlayWorld world(24, transport);
    std::mt19937 random(3);
    std::map<OverlayWorld::Ends, int> said;
    for (int i = 0; i < 20000; ++i) {
      const int from = static_cast<int>(random() % 24);
      const int to = static_cast<int>(random() % 24);
      if (from == to) continue;
      int& count = said[{from, to}];
      if (world.Say(from, to, Numbered(from, to, count))) ++count;
      if (i % 3 == 0) world.Turn(static_cast<int>(random() % 24));
    }
    world.Settle();
    for (const auto& [ends, count] : said) CheckOrder(world, ends.first, ends.second, count);
    for (const auto& overlay : world.overlays) {
      CHECK(overlay->counters().relayed > 0);
      CHECK_EQ(overlay->counters().repeated, 0u);
      CHECK_EQ(overlay->counters().dropped, 0u);
    }
  }
}

TEST(a_source_has_a_window_and_a_relay_has_none) {
  OverlayWorld world(24);
  int said = 0;
  while (world.Say(0, 11, Numbered(0, 11, said))) ++said;
  CHECK_EQ(static_cast<size_t>(said), Overlay::kWindow);
  // Nobody but the source has turned: what its neighbour has not read waits, and blocks nobody.
  CHECK(world.Say(0, 3, Numbered(0, 3, 0)));
  world.Settle();
  CheckOrder(world, 0, 11, said);
  CheckOrder(world, 0, 3, 1);
  CHECK(world.Say(0, 11, "again"));
}

TEST(all_ranks_hear_of_a_death_and_of_no_other) {
  for (int size : {5, 24, 40}) {
    OverlayWorld world(size);
    world.Kill(3);
    world.Settle();
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; peer < size; ++peer) {
        const bool expected = rank != 3 && peer == 3;
        CHECK_EQ((world.lost.count({rank, peer}) == 1), expected);
      }
    }
  }
}

TEST(who_ends_because_another_one_died_is_not_blamed) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 60; ++trial) {
    OverlayWorld world(24);
    const int dead = static_cast<int>(random() % 24);
    world.Kill(dead);
    // Each rank ends as soon as it knows of a loss, as a program without a handler does.
    for (int turn = 0; turn < 24 * 200; ++turn) {
      const int rank = static_cast<int>(random() % 24);
      if (!world.alive(rank)) continue;
      world.Turn(rank);
      if (world.first_loss.count(rank) == 0) continue;
      CHECK_EQ(world.first_loss[rank], dead);
      world.Kill(rank);
    }
    CHECK_EQ(world.first_loss.size(), 23u);
  }
}

// Of two living ranks the connection ends, or one that was opened later: nobody who has a link to
// either of them lets go of it, so it costs no more than the two.
TEST(a_cut_between_living_ranks_ends_no_other_link) {
  const int size = 24;
  for (const auto& [one, two] : {OverlayWorld::Ends{9, 10}, {9, 12}}) {
    OverlayWorld world(size);
    const bool neighbours = world.At(one, two)->Direct();
    CHECK_EQ(neighbours, two == 10);
    if (!neighbours) {
      auto [low, high] = world.Connect(one, two);
      world.overlays[static_cast<size_t>(one)]->Adopt(two, std::move(low));
      world.overlays[static_cast<size_t>(two)]->Adopt(one, std::move(high));
    }
    world.ranks[static_cast<size_t>(one)][static_cast<size_t>(two)].reset();
    world.Settle();
    for (const auto& [ends, why] : world.lost) {
      const auto [rank, peer] = ends;
      CHECK(peer == one || peer == two);
      if (rank == one || rank == two) continue;
      CHECK(neighbours);  // of a link that was opened later nobody else hears
      CHECK(!world.At(rank, peer));
    }
    CHECK_EQ(world.lost.count({two, one}), 1u);
    // Who kept its link hears of a death that comes after.
    const int third = one - 1;
    world.Kill(one);
    world.Settle();
    CHECK_EQ(world.lost.count({third, one}), 1u);
  }
}

TEST(nothing_between_survivors_is_lost_with_a_relay) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 20; ++trial) {
    OverlayWorld world(24);
    const int dead = static_cast<int>(random() % 24);
    std::map<OverlayWorld::Ends, int> said;
    for (int i = 0; i < 4000; ++i) {
      if (i == 2000) world.Kill(dead);
      const int from = static_cast<int>(random() % 24);
      const int to = static_cast<int>(random() % 24);
      if (from == to || !world.alive(from) || world.At(from, to) == nullptr) continue;
      int& count = said[{from, to}];
      if (world.Say(from, to, Numbered(from, to, count))) ++count;
      if (i % 4 == 0) world.Turn(static_cast<int>(random() % 24));
    }
    for (int round = 0; round < 5; ++round) {
      world.Settle();
      world.now_us += Overlay::kRepeatUs;
    }
    for (const auto& [ends, count] : said) {
      if (ends.first != dead && ends.second != dead) {
        CheckOrder(world, ends.first, ends.second, count);
      }
    }
    CHECK_EQ(world.lost.size(), 23u);
  }
}

TEST(who_said_goodbye_relays_nothing_and_its_end_is_no_loss) {
  OverlayWorld world(24);
  const int leaver = 4;
  for (int rank = 0; rank < 24; ++rank) {
    if (rank != leaver) world.At(rank, leaver)->PeerLeaves();
  }
  const uint64_t before = world.overlays[leaver]->counters().relayed;
  for (int from = 0; from < 24; ++from) {
    for (int to = 0; to < 24; ++to) {
      if (from == to || from == leaver || to == leaver) continue;
      CHECK(world.Say(from, to, Numbered(from, to, 0)));
    }
  }
  world.Settle();
  CHECK_EQ(world.overlays[leaver]->counters().relayed, before);
  world.Kill(leaver);
  world.Settle();
  // Its neighbours see the end of their links; nobody else is told.
  CHECK_EQ(world.lost.size(), OverlayNeighbours(leaver, 24).size());
  for (int from = 0; from < 24; ++from) {
    for (int to = 0; to < 24; ++to) {
      if (from != to && from != leaver && to != leaver) CheckOrder(world, from, to, 1);
    }
  }
}

TEST(without_a_way_a_rank_is_lost_to_who_needs_it) {
  OverlayWorld world(24);
  for (int neighbour : OverlayNeighbours(0, 24)) {
    for (int rank = 0; rank < 24; ++rank) {
      if (rank != neighbour && world.alive(rank) && world.At(rank, neighbour) != nullptr) {
        world.At(rank, neighbour)->PeerLeaves();
      }
    }
    world.Kill(neighbour);
  }
  world.Settle();
  CHECK_EQ(world.lost.count({0, 11}), 0u);
  CHECK(world.Say(0, 11, "into the void"));
  world.Settle();
  CHECK_EQ(world.lost.count({0, 11}), 1u);
  CHECK((world.lost[{0, 11}].find("cannot be reached") != std::string::npos));
}

TEST(data_to_a_stranger_asks_once_for_a_link_on_both_sides_and_flows_when_it_is_there) {
  OverlayWorld world(24);
  CHECK(!world.At(2, 5)->Direct());
  CHECK(world.At(2, 4)->Direct());
  // Both want it at the same time.
  CHECK(world.At(2, 5)->BeginSend(Lane::kData, 8).data() == nullptr);
  CHECK(world.At(5, 2)->BeginSend(Lane::kData, 8).data() == nullptr);
  CHECK(world.At(2, 5)->BeginSend(Lane::kData, 8).data() == nullptr);
  world.Settle();
  std::sort(world.wanted.begin(), world.wanted.end());
  CHECK((world.wanted == std::vector<OverlayWorld::Ends>{{2, 5}, {5, 2}}));
  auto [low, high] = world.Connect(2, 5);
  world.overlays[2]->Adopt(5, std::move(low));
  CHECK(world.At(2, 5)->Direct());
  world.overlays[5]->Adopt(2, std::move(high));
  const MutableByteSpan room = world.At(2, 5)->BeginSend(Lane::kData, 8);
  CHECK(room.data() != nullptr);
  std::memcpy(room.data(), "12345678", 8);
  FrameHeader header;
  header.generation = 7;
  header.ticket = 9;
  world.At(2, 5)->CommitSend(Lane::kData, header);
  CHECK_EQ(world.At(2, 5)->data_bytes_sent(), 8u);
  world.Settle();
  InFrame frame;
  CHECK(world.At(5, 2)->Poll(Lane::kData, &frame));
  CHECK_EQ(frame.header.ticket, 9u);
  CHECK_EQ(std::string(reinterpret_cast<const char*>(frame.payload.data()), 8), "12345678");
  world.At(5, 2)->Release(Lane::kData, frame);
  // Its end is the peer's death, for everybody.
  world.Kill(5);
  world.Settle();
  CHECK_EQ(world.lost.size(), 23u);
}

TEST(only_the_lower_rank_wanting_wakes_the_higher_one) {
  OverlayWorld world(24);
  CHECK(world.At(2, 5)->BeginSend(Lane::kData, 8).data() == nullptr);
  world.Settle();
  CHECK((world.wanted == std::vector<OverlayWorld::Ends>{{2, 5}, {5, 2}}));
  world.wanted.clear();
  CHECK(world.At(20, 7)->BeginSend(Lane::kData, 8).data() == nullptr);
  world.Settle();
  CHECK((world.wanted == std::vector<OverlayWorld::Ends>{{20, 7}}));
}

TEST(a_frame_that_no_rank_may_send_ends_the_link_it_came_by) {
  OverlayWorld world(24);
  // As the engine never does: marked as relayed, and about a rank that does not exist.
  Link* link = world.At(0, 1);
  CHECK(link->BeginSend(Lane::kControl, 0).data() != nullptr);
  FrameHeader header;
  header.type = 3;
  header.generation = 7;
  header.phase = 1;
  header.slice = 5u << 16 | 99;
  link->CommitSend(Lane::kControl, header);
  world.Turn(1);
  world.Turn(1);
  CHECK((world.lost[{1, 0}].find("breaks the protocol") != std::string::npos));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
