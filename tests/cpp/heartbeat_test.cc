// The heartbeat monitor, driven by hand: what counts as silence, and what never does.
#include "membership/heartbeat.h"

#include <algorithm>

#include "check.h"

namespace tfdist {
namespace {

constexpr int64_t kMs = 1000;

// Ticks every period from `*now_us` until evidence comes or `limit_us` has passed; -1: none came.
int64_t TicksUntilEvidence(HeartbeatMonitor* monitor, int64_t* now_us, int64_t limit_us,
                           std::vector<Evidence>* evidence) {
  const int64_t begin_us = *now_us;
  while (*now_us - begin_us < limit_us) {
    *now_us += 100 * kMs;
    HeartbeatMonitor::Turn turn = monitor->Tick(*now_us);
    if (!turn.evidence.empty()) {
      *evidence = turn.evidence;
      return *now_us - begin_us;
    }
  }
  return -1;
}

TEST(own_time_counts_a_late_tick_as_one_period) {
  OwnTime time(100 * kMs);
  CHECK_EQ(time.Advance(5000 * kMs), 0);
  CHECK_EQ(time.Advance(5100 * kMs), 100 * kMs);
  CHECK_EQ(time.Advance(5290 * kMs), 190 * kMs);
  CHECK_EQ(time.Advance(65290 * kMs), 100 * kMs);
  CHECK_EQ(time.Advance(65280 * kMs), 0);
}

TEST(watching_is_mutual_and_sparse_in_large_worlds) {
  for (int size : {1, 2, 3, 8, 9, 16, 17, 64, 100}) {
    for (int r = 0; r < size; ++r) {
      const std::vector<int> watched = WatchedRanks(r, size);
      CHECK(std::is_sorted(watched.begin(), watched.end()));
      CHECK(std::count(watched.begin(), watched.end(), r) == 0);
      for (int other : watched) {
        CHECK(other >= 0 && other < size);
        const std::vector<int> back = WatchedRanks(other, size);
        CHECK_EQ_IN(std::count(back.begin(), back.end(), r), 1, "size " + std::to_string(size));
      }
      if (size <= 8) CHECK_EQ(watched.size(), static_cast<size_t>(size - 1));
      if (size == 64) CHECK_EQ(watched.size(), size_t{11});
    }
  }
}

TEST(a_silent_peer_of_another_host_is_suspected_within_its_limit) {
  HeartbeatMonitor monitor(0, {0, 1}, {true, false});
  int64_t now_us = 0;
  std::vector<Evidence> evidence;
  const int64_t took_us = TicksUntilEvidence(&monitor, &now_us, 5000 * kMs, &evidence);
  CHECK(took_us >= 2000 * kMs && took_us <= 2300 * kMs);
  CHECK_EQ(evidence.size(), size_t{1});
  CHECK_EQ(evidence[0].rank, 1);
  CHECK(!evidence[0].certain);
  // Once is enough.
  CHECK_EQ(TicksUntilEvidence(&monitor, &now_us, 5000 * kMs, &evidence), -1);
}

TEST(a_process_that_runs_is_never_suspected_on_this_host) {
  HeartbeatMonitor monitor(0, {0, 1}, {true, true});
  for (int64_t now_us = 0; now_us < 60000 * kMs; now_us += 100 * kMs) {
    for (int peer : monitor.WantProcessState()) {
      CHECK(now_us >= 300 * kMs);
      monitor.SetProcessState(peer, ProcessState::kRunning);
    }
    CHECK(monitor.Tick(now_us).evidence.empty());
  }
}

TEST(a_stopped_process_is_suspected_and_a_gone_one_is_certain) {
  for (const ProcessState state : {ProcessState::kStopped, ProcessState::kGone}) {
    HeartbeatMonitor monitor(0, {0, 1}, {true, true});
    std::vector<Evidence> evidence;
    int64_t now_us = 0;
    while (evidence.empty() && now_us < 5000 * kMs) {
      now_us += 100 * kMs;
      for (int peer : monitor.WantProcessState()) monitor.SetProcessState(peer, state);
      evidence = monitor.Tick(now_us).evidence;
    }
    CHECK_EQ(evidence.size(), size_t{1});
    CHECK_EQ(evidence[0].certain, state == ProcessState::kGone);
    if (state == ProcessState::kGone) CHECK(now_us <= 500 * kMs);
    if (state == ProcessState::kStopped) CHECK(now_us > 1000 * kMs && now_us <= 1600 * kMs);
  }
}

TEST(a_short_stop_is_forgiven) {
  HeartbeatMonitor monitor(0, {0, 1}, {true, true});
  for (int64_t now_us = 0; now_us < 20000 * kMs; now_us += 100 * kMs) {
    const bool stopped = now_us / (1000 * kMs) % 2 == 1;  // every other second
    for (int peer : monitor.WantProcessState()) {
      monitor.SetProcessState(peer, stopped ? ProcessState::kStopped : ProcessState::kRunning);
    }
    if (!stopped) monitor.OnFrame(1);
    CHECK(monitor.Tick(now_us).evidence.empty());
  }
}

TEST(time_in_which_this_rank_did_not_run_is_nobodys_silence) {
  HeartbeatMonitor monitor(0, {0, 1, 2}, {false, false, false});
  int64_t now_us = 0;
  for (int turn = 0; turn < 15; ++turn) CHECK(monitor.Tick(now_us += 60000 * kMs).evidence.empty());
}

TEST(a_peer_that_reads_nothing_gets_four_beats) {
  HeartbeatMonitor monitor(0, {0, 1}, {true, true});
  size_t beats = 0;
  uint32_t last = 0;
  for (int64_t now_us = 0; now_us < 10000 * kMs; now_us += 100 * kMs) {
    monitor.SetProcessState(1, ProcessState::kRunning);
    for (const auto& [peer, beat] : monitor.Tick(now_us).beats) {
      ++beats;
      last = beat.sequence;
    }
  }
  CHECK_EQ(beats, size_t{4});
  monitor.Receive(1, {1, last});  // it has read all of them: four more, no more than that
  for (int64_t now_us = 10000 * kMs; now_us < 20000 * kMs; now_us += 100 * kMs) {
    monitor.SetProcessState(1, ProcessState::kRunning);
    beats += monitor.Tick(now_us).beats.size();
  }
  CHECK_EQ(beats, size_t{8});
}

TEST(two_ranks_whose_beats_were_all_held_up_find_each_other_again) {
  HeartbeatMonitor a(0, {0, 1}, {true, false});
  HeartbeatMonitor b(1, {0, 1}, {false, true});
  std::vector<std::pair<HeartbeatMonitor*, Heartbeat>> under_way;
  for (int64_t now_us = 0; now_us < 20000 * kMs; now_us += 100 * kMs) {
    const HeartbeatMonitor::Turn turn_a = a.Tick(now_us);
    const HeartbeatMonitor::Turn turn_b = b.Tick(now_us);
    CHECK(turn_a.evidence.empty() && turn_b.evidence.empty());
    for (const auto& [peer, beat] : turn_a.beats) under_way.push_back({&b, beat});
    for (const auto& [peer, beat] : turn_b.beats) under_way.push_back({&a, beat});
    if (now_us % (5000 * kMs) < 1000 * kMs) continue;  // a cut of a second, every five
    for (const auto& [monitor, beat] : under_way) monitor->Receive(monitor == &a ? 1 : 0, beat);
    under_way.clear();
  }
}

TEST(an_acknowledgement_of_what_was_never_sent_is_ignored) {
  HeartbeatMonitor monitor(0, {0, 1}, {true, true});
  monitor.Receive(1, {1, 1000000});
  size_t beats = 0;
  for (int64_t now_us = 0; now_us < 5000 * kMs; now_us += 100 * kMs) {
    monitor.SetProcessState(1, ProcessState::kRunning);
    beats += monitor.Tick(now_us).beats.size();
  }
  CHECK_EQ(beats, size_t{4});
}

TEST(silent_peers_are_reported_together) {
  HeartbeatMonitor monitor(3, {0, 1, 2, 3, 4}, {false, false, false, true, false});
  std::vector<Evidence> evidence;
  for (int64_t now_us = 0; evidence.empty() && now_us < 5000 * kMs; now_us += 100 * kMs) {
    if (now_us <= 200 * kMs) monitor.OnFrame(1);
    if (now_us <= 400 * kMs) monitor.OnFrame(4);
    monitor.OnFrame(2);
    evidence = monitor.Tick(now_us).evidence;
  }
  CHECK_EQ(evidence.size(), size_t{3});
  CHECK_EQ(evidence[0].rank, 0);
  CHECK_EQ(evidence[1].rank, 1);
  CHECK_EQ(evidence[2].rank, 4);
}

TEST(of_two_that_lost_each_other_the_smaller_rank_accuses_first) {
  HeartbeatMonitor small(0, {0, 1}, {true, false});
  HeartbeatMonitor large(1, {0, 1}, {false, true});
  std::vector<Evidence> evidence;
  int64_t now_us = 0;
  const int64_t small_us = TicksUntilEvidence(&small, &now_us, 5000 * kMs, &evidence);
  now_us = 0;
  const int64_t large_us = TicksUntilEvidence(&large, &now_us, 5000 * kMs, &evidence);
  CHECK(small_us + 200 * kMs < large_us);
  CHECK(large_us <= 3000 * kMs);
}

TEST(watching_all_starts_their_clocks_afresh) {
  std::vector<int> members;
  for (int r = 0; r < 32; ++r) members.push_back(r);
  HeartbeatMonitor monitor(0, members, std::vector<bool>(32, false));
  for (int64_t now_us = 0; now_us < 5000 * kMs; now_us += 100 * kMs) {
    for (int r : WatchedRanks(0, 32)) monitor.OnFrame(r);
    CHECK(monitor.Tick(now_us).evidence.empty());
  }
  monitor.WatchAll();
  size_t beats = 0;
  for (int64_t now_us = 5000 * kMs; now_us < 6000 * kMs; now_us += 100 * kMs) {
    HeartbeatMonitor::Turn turn = monitor.Tick(now_us);
    CHECK(turn.evidence.empty());
    beats = std::max(beats, turn.beats.size());
  }
  CHECK(beats > WatchedRanks(0, 32).size());
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
