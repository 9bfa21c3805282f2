// One verdict: who is named when something dies, on every survivor in the same words.
#include "buckets.h"
#include "check.h"
#include "hand_driven.h"

namespace tfdist {
namespace {

// Time passes by hand here: limits are the same on a slow machine.
Config Limits() {
  Config config = TestConfig();
  config.timeout_s = 15;
  config.peer_timeout_s = 2;
  return config;
}

// All ranks but the last wait for one allreduce.
struct Waiting {
  explicit Waiting(HandDriven* world) : data(static_cast<size_t>(world->size())) {
    for (int r = 0; r + 1 < world->size(); ++r) {
      auto& own = data[static_cast<size_t>(r)];
      own.assign(10, 1.0f);
      done.push_back(world->Allreduce(r, "x", &own));
    }
    world->Settle();
  }
  std::vector<std::vector<float>> data;
  std::vector<Done> done;
};

std::string Error(const Done& done) {
  return *done == nullptr ? "under way" : (*done)->message() + (*done)->payload();
}

TEST(two_deaths_at_once_are_one_verdict) {
  HandDriven world(5, Limits());
  Waiting waiting(&world);
  world.Kill(1);
  world.Kill(3);
  // Some see one first, some the other.
  for (int turn = 0; turn < 40; ++turn) world.Poll(turn % 2 == 0 ? 4 : 2), world.Poll(0);
  world.Settle();
  CHECK_CONTAINS(TextOf(waiting.done[0]), "failed: its process ended or was killed");
  CHECK_EQ(Error(waiting.done[2]), Error(waiting.done[0]));
  CHECK_EQ(world[4].failure().message() + world[4].failure().payload(), Error(waiting.done[0]));
}

TEST(the_death_of_the_leader_names_it_everywhere) {
  HandDriven world(4, Limits());
  Waiting waiting(&world);
  world.Kill(0);
  world.Settle();
  CHECK_CONTAINS(Error(waiting.done[1]), "rank 0 (host testhost, pid 4000) failed");
  CHECK_CONTAINS(Error(waiting.done[1]), "\"x\" was in progress");
  CHECK_EQ(Error(waiting.done[2]), Error(waiting.done[1]));
}

TEST(nobody_raises_before_all_have_agreed) {
  HandDriven world(4, Limits());
  Waiting waiting(&world);
  world.Kill(3);
  for (int i = 0; i < 10; ++i) world.Poll(1);
  CHECK_EQ(Error(waiting.done[1]), "under way");
  CHECK_OK(world[1].failure());
  std::vector<float> late(10);
  const Done after = world.Allreduce(1, "after", &late);
  CHECK_EQ(Error(after), "under way");  // what comes meanwhile waits for the verdict too
  world.Settle();
  CHECK_EQ(Error(after), Error(waiting.done[0]));
  CHECK_EQ(Error(waiting.done[1]), Error(waiting.done[0]));
}

TEST(an_own_failure_and_a_death_at_once) {
  HandDriven world(5, Limits());
  Waiting waiting(&world);
  world[1].AbortWith({"ValueError: a bad label", "", -1}, world.now_us);
  world.Kill(3);
  CHECK_CONTAINS(Error(waiting.done[1]), "ValueError: a bad label");  // at once
  world.Settle();
  CHECK_CONTAINS(Error(waiting.done[1]), "rank 1");
  const std::string verdict = Error(waiting.done[0]);
  const bool named = Contains(verdict, "\"rank\": 1,") || Contains(verdict, "\"rank\": 3,");
  CHECK_EQ_IN(named, true, verdict);
  CHECK_EQ(Error(waiting.done[2]), verdict);
}

TEST(a_deadline_is_one_verdict_with_the_leaders_words) {
  HandDriven world(4, Limits());
  Waiting waiting(&world);
  world.Pass(16 * 1000 * 1000);
  CHECK_CONTAINS(Error(waiting.done[0]), "for rank 3");
  CHECK_CONTAINS(Error(waiting.done[0]), "\"kind\": \"timeout\"");
  for (const Done& done : waiting.done) CHECK_EQ(Error(done), Error(waiting.done[0]));
}

TEST(who_has_left_properly_is_no_culprit_and_holds_up_no_verdict) {
  HandDriven world(4, Limits());
  world[0].Leave(world.now_us);
  world.Settle();
  world.Kill(0);
  world.Settle();
  for (int r = 1; r < 4; ++r) CHECK_OK(world[r].failure());
  world.Kill(3);
  world.Settle();
  CHECK_CONTAINS(world[1].failure().message(), "rank 3");
  CHECK_EQ(world[2].failure().message(), world[1].failure().message());
}

TEST(a_stopped_process_is_suspected_and_finds_itself_out) {
  std::map<int, ProcessState> processes;
  for (int r = 0; r < 4; ++r) processes[r] = ProcessState::kRunning;
  HandDriven world(4, Limits(), &processes);
  Waiting waiting(&world);
  // Stopped: it does not run, its links stand.
  processes[3] = ProcessState::kStopped;
  std::unique_ptr<Engine> stopped = std::move(world.engines[3]);
  world.Pass(900 * 1000);
  CHECK_EQ(Error(waiting.done[0]), "under way");
  world.Pass(1500 * 1000);
  CHECK_CONTAINS(Error(waiting.done[0]), "rank 3 (host testhost, pid 4003) failed: its process");
  CHECK_CONTAINS(Error(waiting.done[0]), "has been stopped");
  CHECK_EQ(Error(waiting.done[1]), Error(waiting.done[0]));
  world.engines[3] = std::move(stopped);
  world.Settle();
  CHECK_CONTAINS(world[3].failure().message(), "was taken out of the job by the other ranks");
  CHECK_CONTAINS(world[3].failure().payload(), "\"kind\": \"evicted\"");
}

// Half of the ranks are out, rank 0 among them: without the certainty that a stopped rank of this
// host can be barred, the other half could not decide.
TEST(a_killed_and_a_stopped_rank_of_a_host_are_one_verdict) {
  std::map<int, ProcessState> processes;
  for (int r = 0; r < 4; ++r) processes[r] = ProcessState::kRunning;
  HandDriven world(4, Limits(), &processes, "shm");
  Waiting waiting(&world);
  world.Kill(0);
  processes[0] = ProcessState::kGone;
  processes[3] = ProcessState::kStopped;
  std::unique_ptr<Engine> stopped = std::move(world.engines[3]);
  world.Pass(2500 * 1000);
  CHECK_CONTAINS(Error(waiting.done[1]), "rank 0 (host testhost, pid 4000) failed: its process");
  CHECK_CONTAINS(Error(waiting.done[1]), "; also: rank 3 (host testhost, pid 4003) failed");
  CHECK_CONTAINS(Error(waiting.done[1]), "has been stopped");
  CHECK_CONTAINS(Error(waiting.done[1]), "\"kind\": \"rank_failed\", \"rank\": 0");
  CHECK_EQ(Error(waiting.done[2]), Error(waiting.done[1]));
  processes[3] = ProcessState::kRunning;
  world.engines[3] = std::move(stopped);
  world.Settle();
  CHECK_CONTAINS(world[3].failure().payload(), "\"kind\": \"evicted\"");
}

// All that it hears of the others is that they are dead: alone it would decide about them.
TEST(a_rank_that_was_barred_while_it_was_stopped_decides_nothing) {
  std::map<int, ProcessState> processes = {{0, ProcessState::kRunning},
                                           {1, ProcessState::kStopped}};
  HandDriven world(2, Limits(), &processes, "shm");
  std::vector<float> data(10);
  const Done done = world.Allreduce(0, "x", &data);
  std::unique_ptr<Engine> stopped = std::move(world.engines[1]);
  world.control_open[1] = false;
  world.Pass(2500 * 1000);
  CHECK_CONTAINS(Error(done), "has been stopped");
  world.Kill(0);
  processes = {{0, ProcessState::kGone}, {1, ProcessState::kRunning}};
  world.engines[1] = std::move(stopped);
  world.Pass(1000 * 1000);
  CHECK_CONTAINS(world[1].failure().payload(), "\"kind\": \"evicted\"");
  CHECK_CONTAINS(world[1].failure().message(), "while it was stopped");
}

TEST(a_rank_can_name_another_one_as_the_culprit) {
  HandDriven world(3, Limits());
  Waiting waiting(&world);
  world[1].AbortWith({"OSError: the disk of rank 2 is full", "line 7", 2}, world.now_us);
  world.Settle();
  CHECK_CONTAINS(Error(waiting.done[0]), "rank 2 (host testhost, pid 4002) failed");
  CHECK_CONTAINS(Error(waiting.done[0]), "OSError: the disk of rank 2 is full");
  CHECK_CONTAINS(Error(waiting.done[0]), "\"rank\": 2");
  CHECK_CONTAINS(Error(waiting.done[0]), "\"detail\": \"line 7\"");
  CHECK_CONTAINS(Error(waiting.done[1]), "rank 2 (host testhost, pid 4002) failed");
}

TEST(a_process_that_runs_is_never_suspected) {
  std::map<int, ProcessState> processes;
  for (int r = 0; r < 3; ++r) processes[r] = ProcessState::kRunning;
  HandDriven world(3, Limits(), &processes);
  std::unique_ptr<Engine> starved = std::move(world.engines[2]);
  world.Pass(10 * 1000 * 1000);
  CHECK_OK(world[0].failure());
  world.engines[2] = std::move(starved);
  world.Pass(1000 * 1000);
  for (int r = 0; r < 3; ++r) CHECK_OK(world[r].failure());
}

TEST(a_rank_that_loses_touch_says_with_whom) {
  HandDriven world(2, Limits());
  std::vector<float> data(10);
  const Done done = world.Allreduce(1, "x", &data);
  std::unique_ptr<Engine> silent = std::move(world.engines[0]);
  world.Pass(5 * 1000 * 1000);
  CHECK_CONTAINS(Error(done), "rank 0 (host testhost, pid 4000) failed: no sign of life");
  CHECK_CONTAINS(Error(done), "no majority");
  CHECK_CONTAINS(Error(done), "\"kind\": \"no_majority\", \"rank\": 0");
}

// Both ends of a connection can see its end while both live.
TEST(a_connection_that_ended_is_no_death_while_the_process_is_there) {
  std::map<int, ProcessState> processes = {{0, ProcessState::kRunning},
                                           {1, ProcessState::kRunning}};
  HandDriven world(2, Limits(), &processes);
  std::vector<float> data(10);
  const Done done = world.Allreduce(1, "x", &data);
  world.Kill(0);
  world.Settle();
  CHECK_EQ(Error(done), "under way");
  world.Pass(2 * 1000 * 1000);
  CHECK_CONTAINS(Error(done), "although its process is there");
  CHECK_CONTAINS(Error(done), "no majority");
}

TEST(a_process_that_is_seen_to_be_gone_is_a_death) {
  std::map<int, ProcessState> processes = {{0, ProcessState::kRunning},
                                           {1, ProcessState::kRunning}};
  HandDriven world(2, Limits(), &processes);
  std::vector<float> data(10);
  const Done done = world.Allreduce(1, "x", &data);
  world.Kill(0);
  world.Settle();
  processes[0] = ProcessState::kGone;
  world.Settle();
  CHECK_CONTAINS(Error(done), "rank 0 (host testhost, pid 4000) failed: its process ended");
  CHECK_CONTAINS(Error(done), "\"kind\": \"rank_failed\"");
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
