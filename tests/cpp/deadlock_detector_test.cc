// The search for deadlocks alone: rank 0 of two, the other one played by hand.
#include "scheduler/deadlock_detector.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace tfdist {
namespace {

struct Failures : FailureSink {
  void Suspect(int /*rank*/, bool /*certain*/, const Status& status) override {
    suspected.push_back(status);
  }
  void ReportBug(const Status& status, int64_t /*now_us*/) override { bugs.push_back(status); }

  std::vector<Status> suspected;
  std::vector<Status> bugs;
};

struct Nobody : ControlLane::Receiver {
  void OnControlMessage(int, FrameType, uint32_t, ByteSpan, int64_t) override {}
  void OnBadControlFrame(int, int64_t) override {}
};

RequestInfo Barrier(const std::string& key) {
  RequestInfo info;
  info.key = key;
  info.kind = CollectiveKind::kBarrier;
  info.timeout_s = 10;
  return info;
}

// Rank 0 waits for "x", which rank 1 has not called; rank 1 for "y", which rank 0 has not.
struct Rank0 {
  Rank0() {
    world.size = 2;
    sets = std::make_unique<ProcessSetRegistry>(world, config);
    ProcessSet* set = sets->Find(kWorldSet);
    auto request = std::make_unique<Request>();
    request->info = Barrier("x");
    set->entries["x"].push_back(std::move(request));
    CHECK_OK(set->negotiator->Add(0, Barrier("x"), 0));
    CHECK_OK(set->negotiator->Add(1, Barrier("y"), 0));
    state.moves = 7;
    control = std::make_unique<ControlLane>(world, links, &monitor, &nobody);
    detector = std::make_unique<DeadlockDetector>(
        DeadlockDetector::Access{0, state, *sets, control.get(), &failures, still});
  }
  // A note of rank 1; `round`: of the question that it answers.
  void Hear(uint64_t moves, uint32_t round, bool waits = true) {
    BlockedNote note;
    note.round = round;
    note.moves = moves;
    note.place = "b.py:2";
    if (waits) note.waits = {{kWorldSet, {0, 1}, 0, "y"}};
    detector->OnNote(1, std::move(note));
  }

  World world;
  Config config;
  EngineState state;
  std::unique_ptr<ProcessSetRegistry> sets;
  Links links{2};
  HeartbeatMonitor monitor{0, {0, 1}, {false, false}};
  Nobody nobody;
  Failures failures;
  std::vector<std::pair<uint64_t, int64_t>> stills;
  std::function<void(uint64_t, int64_t)> still = [this](uint64_t moves, int64_t still_us) {
    stills.emplace_back(moves, still_us);
  };
  std::unique_ptr<ControlLane> control;
  std::unique_ptr<DeadlockDetector> detector;
};

TEST(ranks_that_still_wait_when_asked_again_end_the_work) {
  Rank0 rank;
  rank.detector->ReportBlocked(7, BlockedNote::How::kEager, "a.py:1");
  CHECK(rank.failures.suspected.empty());
  rank.Hear(3, 0);
  CHECK(rank.failures.suspected.empty());  // it is asked first
  rank.Hear(3, 1);
  CHECK_EQ(rank.failures.suspected.size(), size_t{1});
  const std::string& text = rank.failures.suspected[0].message();
  CHECK(text.find("Deadlock: no rank can continue. rank 0 waits in a.py:1 for rank 1") == 0);
  CHECK(text.find("rank 1 waits in b.py:2 for rank 0 (\"y\")") != std::string::npos);
}

TEST(a_rank_that_has_moved_since_is_no_part_of_a_deadlock) {
  Rank0 rank;
  rank.detector->ReportBlocked(7, BlockedNote::How::kEager, "a.py:1");
  rank.Hear(3, 0);
  rank.Hear(4, 1);  // asked again
  CHECK(rank.failures.suspected.empty());
  rank.Hear(4, 1);  // of the round before: too late
  CHECK(rank.failures.suspected.empty());
  rank.Hear(5, 2, false);
  CHECK(rank.failures.suspected.empty());
}

TEST(nothing_is_said_of_what_has_moved_or_stopped) {
  Rank0 rank;
  rank.detector->ReportBlocked(6, BlockedNote::How::kEager, "a.py:1");
  rank.Hear(3, 0);
  rank.Hear(3, 1);
  CHECK(rank.failures.suspected.empty());
  rank.state.stopped = true;
  rank.detector->ReportBlocked(7, BlockedNote::How::kEager, "a.py:1");
  CHECK(rank.failures.suspected.empty());
}

TEST(the_time_without_a_move_counts_while_something_waits) {
  Rank0 rank;
  rank.detector->Tick(1000);  // the moves are new
  rank.detector->Tick(1500);
  ++rank.state.moves;
  rank.detector->Tick(1800);
  rank.sets->Find(kWorldSet)->entries.clear();
  rank.detector->Tick(2000);
  const std::vector<std::pair<uint64_t, int64_t>> expected = {{7, 0}, {7, 500}, {8, 0}, {8, 0}};
  CHECK(rank.stills == expected);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
