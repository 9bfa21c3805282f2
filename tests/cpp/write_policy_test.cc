// WritePolicy against machines that are formulas.
#include "transport/write_policy.h"

#include <array>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace tfdist {
namespace {

constexpr size_t kBytes = size_t{128} << 10;

// The cost of a payload, in ns; in phase 1 it is ten times as much, like that of a payload that is
// reduced beside one that is copied.
struct Machine {
  double cached = 1;
  double streamed = 1;
  double disturbed = 0.3;  // part of the payloads that take up to ten times as long
  std::mt19937 random{1};

  int64_t Cost(bool is_streamed, uint16_t phase) {
    double ns = 10000 * (is_streamed ? streamed : cached) * (phase == 0 ? 1 : 10);
    if (std::uniform_real_distribution<>(0, 1)(random) < disturbed) {
      ns *= std::uniform_real_distribution<>(1, 10)(random);
    }
    return static_cast<int64_t>(ns * std::uniform_real_distribution<>(1, 1.05)(random));
  }
};

// Sends payloads of two phases in turns; the outcome of each is known `delay` payloads later.
int Streamed(WritePolicy* choice, Machine* machine, int payloads) {
  constexpr int kDelay = 5;
  std::vector<bool> ways;
  int streamed = 0;
  for (int i = 0; i < payloads + kDelay; ++i) {
    if (i < payloads) {
      ways.push_back(choice->Next(kBytes));
      streamed += ways.back() ? 1 : 0;
    }
    const int told = i - kDelay;
    if (told < 0) continue;
    const bool way = ways[static_cast<size_t>(told)];
    const auto phase = static_cast<uint16_t>(told % 2);
    choice->Add(way, phase, kBytes, machine->Cost(way, phase));
  }
  return streamed;
}

TEST(where_both_share_a_cache_nearly_nothing_is_streamed) {
  WritePolicy choice;
  Machine near{1, 2};
  Streamed(&choice, &near, 20000);
  CHECK(Streamed(&choice, &near, 100000) < 1000);
}

TEST(where_lines_travel_nearly_everything_is_streamed) {
  WritePolicy choice;
  Machine far{4, 1};
  CHECK(Streamed(&choice, &far, 1000) > 500);
  Streamed(&choice, &far, 20000);
  CHECK(Streamed(&choice, &far, 100000) > 99000);
}

// The first payloads after a change go to lines that lie where the other way has left them.
TEST(what_the_first_payloads_after_a_change_cost_does_not_count) {
  Machine far{1.5, 1, 0};
  WritePolicy choice;
  std::vector<bool> ways;
  int streamed = 0;
  int since_change = 0;
  for (int i = 0; i < 60000; ++i) {
    const bool way = choice.Next(kBytes);
    since_change = !ways.empty() && way == ways.back() ? since_change + 1 : 0;
    ways.push_back(way);
    const bool first = since_change < 6;
    const auto phase = static_cast<uint16_t>(i % 2);
    choice.Add(way, phase, kBytes, first && !way ? 5000 : far.Cost(way, phase));
    streamed += i >= 10000 && way ? 1 : 0;
  }
  CHECK(streamed > 49000);
}

TEST(ranks_that_are_moved_are_noticed) {
  WritePolicy choice;
  Machine near{1, 2};
  Machine far{4, 2};  // streaming stores cost the same: nothing gets slower when it is left
  Streamed(&choice, &near, 50000);
  CHECK(Streamed(&choice, &far, 2000) > 1500);  // everything rose: at once
  Streamed(&choice, &far, 50000);
  CHECK(Streamed(&choice, &near, 20000) < 5000);
}

TEST(ways_that_cost_about_the_same_end_in_ordinary_stores) {
  WritePolicy choice("auto");
  Machine alike{1, 1, 0};
  Streamed(&choice, &alike, 10000);
  CHECK(Streamed(&choice, &alike, 10000) < 200);
}

// Others use the processors for a while, now and then: what both ways cost rises and falls again.
TEST(slow_moments_do_not_look_like_a_better_way) {
  WritePolicy choice;
  Machine near{1, 1.5};
  Machine slow{2.5, 3.75};
  std::mt19937 random(7);
  int streamed = 0;
  int payloads = 0;
  while (payloads < 200000) {
    for (Machine* machine : {&near, &slow}) {
      const int some = std::uniform_int_distribution<>(10, machine == &near ? 500 : 60)(random);
      payloads += some;
      streamed += Streamed(&choice, machine, some);
    }
  }
  CHECK(streamed < payloads / 50);
}

// Two ranks that send each other payloads; what each costs, in ns, is of its way, the other's and
// the phase. Returns how many of each rank's payloads were streamed.
template <typename Cost>
std::array<int, 2> Exchange(std::array<WritePolicy, 2>* ranks, int payloads, int phases,
                            Cost cost) {
  std::array<int, 2> streamed = {};
  for (int i = 0; i < payloads; ++i) {
    const std::array<bool, 2> ways = {(*ranks)[0].Next(kBytes), (*ranks)[1].Next(kBytes)};
    const auto phase = static_cast<uint16_t>(i % phases);
    for (size_t r : {0, 1}) {
      streamed[r] += ways[r] ? 1 : 0;
      (*ranks)[r].Saw(ways[1 - r], kBytes);
      (*ranks)[r].Add(ways[r], phase, kBytes, cost(r, ways[r], ways[1 - r], phase));
    }
  }
  return streamed;
}

// Measured where ranks share no cache (docs/design/0009): who streams alone gains nothing.
int64_t Far(bool own, bool other, uint16_t phase) {
  if (own && other) return phase == 0 ? 6200 : 7500;
  if (own) return phase == 0 ? 14000 : 10000;
  return phase == 0 ? 12300 : 12600;
}

TEST(ranks_that_try_at_different_times_find_what_is_cheaper_for_both) {
  std::array<WritePolicy, 2> ranks;
  for (int i = 0; i < 80; ++i) ranks[0].Add(ranks[0].Next(kBytes), 0, kBytes, 10000);
  // Of one phase, both ways alike: trials become rare.
  Exchange(&ranks, 20000, 1, [](size_t, bool, bool, uint16_t) { return 10000; });
  const std::array<int, 2> streamed =
      Exchange(&ranks, 10000, 2,
               [](size_t, bool own, bool other, uint16_t phase) { return Far(own, other, phase); });
  CHECK(streamed[0] > 5000);
  CHECK(streamed[1] > 5000);
}

TEST(a_rank_that_missed_what_its_peer_found_tries_again_soon) {
  std::array<WritePolicy, 2> ranks;
  int times = 0;
  while (Exchange(&ranks, 100, 2, [](size_t rank, bool own, bool, uint16_t) {
           return own == (rank == 0) ? 10000 : 20000;
         })[0] < 90) {
    CHECK(++times < 1000);
  }
  const auto cost = [](size_t, bool own, bool other, uint16_t phase) {
    return Far(own, other, phase);
  };
  Exchange(&ranks, 300, 2, cost);
  CHECK(Exchange(&ranks, 100, 2, cost)[1] > 60);
}

TEST(two_that_send_in_turns_do_not_answer_each_others_trials_for_ever) {
  std::array<WritePolicy, 2> ranks;
  constexpr int kBurst = 300;  // payloads; more than there is between two trials at first
  constexpr int kBursts = 300;
  int streamed = 0;
  for (int burst = 0; burst < kBursts; ++burst) {
    WritePolicy& sender = ranks[static_cast<size_t>(burst % 2)];
    for (int i = 0; i < kBurst; ++i) {
      const bool way = sender.Next(kBytes);
      ranks[static_cast<size_t>(1 - burst % 2)].Saw(way, kBytes);
      sender.Add(way, static_cast<uint16_t>(i % 2), kBytes, way ? 20000 : 10000);
      streamed += way ? 1 : 0;
    }
  }
  CHECK(streamed < kBursts * kBurst / 50);
}

TEST(the_end_of_a_peers_trial_starts_none) {
  std::array<WritePolicy, 2> ranks;
  const auto cost = [](size_t rank, bool own, bool, uint16_t) {
    return own == (rank == 1) ? 10000 : 20000;
  };
  Exchange(&ranks, 20000, 2, cost);
  const std::array<int, 2> streamed = Exchange(&ranks, 100000, 2, cost);
  CHECK(streamed[0] < 1000);
  CHECK(streamed[1] > 99000);
}

TEST(a_phase_that_comes_no_more_is_not_waited_for) {
  WritePolicy choice;
  for (int i = 0; i < 5000; ++i) {
    const bool way = choice.Next(kBytes);
    choice.Add(way, /*phase=*/3, kBytes, way ? 10000 : 40000);
  }
  CHECK(choice.Next(kBytes) || choice.Next(kBytes));
}

TEST(without_times_the_ordinary_way_stays) {
  WritePolicy choice;
  int streamed = 0;
  for (int i = 0; i < 50000; ++i) {
    const bool way = choice.Next(kBytes);
    streamed += way ? 1 : 0;
    choice.Add(way, 0, kBytes, 0);
  }
  CHECK(streamed > 0);
  CHECK(streamed < 5000);
}

TEST(small_payloads_are_never_streamed) {
  for (const char* wanted : {"auto", "nontemporal"}) {
    WritePolicy choice{std::string(wanted)};
    for (int i = 0; i < 1000; ++i) CHECK(!choice.Next(kTimedBytes - 1));
  }
}

TEST(a_way_that_is_set_stays) {
  WritePolicy cached("cached");
  WritePolicy streamed("nontemporal");
  for (int i = 0; i < 5000; ++i) {
    CHECK(!cached.Next(kBytes));
    CHECK(streamed.Next(kBytes));
    cached.Add(false, 0, kBytes, 1000000);
    streamed.Add(true, 0, kBytes, 1000000);
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
