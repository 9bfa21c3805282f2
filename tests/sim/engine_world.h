// EngineWorld: the real scheduler Engine of N ranks in one thread, over simulated links and time,
// running programs like a training: groups of buckets that become ready in another order on every
// rank, named operations of every kind, process sets, barriers; in every second seed with ranks
// that run out of data and join; and with faults. One seed decides everything.
//
// A rank that has nothing to do but wait says so now and then, as the thread of
// `tfdist.core.deadlock` does.
//
// Invariants: whatever ends OK has the right result; whatever was submitted ends, once, within its
// deadline; where nothing failed, everything ends OK; at the end nothing is held.
#ifndef TFDIST_TESTS_SIM_ENGINE_WORLD_H_
#define TFDIST_TESTS_SIM_ENGINE_WORLD_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "engine_program.h"
#include "scheduler/engine.h"
#include "sim_link.h"

namespace tfdist::sim {

struct EngineResult {
  std::string violation;  // empty: everything held
  std::vector<std::string> trace;
  uint64_t digest = 0;  // of everything that ended, and when: equal in every run of the seed
  std::string fault;
  int64_t operations = 0;  // that ended OK, on all ranks
  int64_t failed = 0;
  bool culprits_differ = false;  // ranks that live blame different ranks
  bool deadlock = false;         // ranks ended because they waited for each other
  int64_t detection_us = -1;     // from a rank's death to the last rank that knows
};

class EngineWorld {
 public:
  EngineWorld(uint64_t seed, bool trace);
  ~EngineWorld();
  EngineResult Run();

 private:
  enum class State : uint8_t { kRuns, kStopped, kDead };
  enum class JoinState : uint8_t { kNone, kCalled, kEnded };
  struct Running {
    Call call;
    int join = -1;  // kJoin: its place in the program
    std::vector<uint8_t> input;
    std::vector<uint8_t> output;
    int64_t deadline_us = 0;
    uint64_t id = 0;
    int done = 0;  // times
    Response answer;
  };
  struct Rank : CompletionSink {
    void Post(std::function<void()> callback) override;
    EngineWorld* world = nullptr;
    int rank = 0;
    State state = State::kRuns;
    int64_t stalled_until_us = 0;
    std::unique_ptr<Engine> engine;
    std::vector<std::function<void(Engine*)>> commands;
    std::deque<std::function<void()>> completions;
    std::vector<std::function<void()>> deferred;  // what came due while it did not run
    bool turn_due = false;
    int64_t turn_at_us = -1;  // the next turn that is scheduled
    int64_t next_tick_us = 0;
    // The program.
    size_t phase = 0;
    size_t open = 0;                         // operations of the phase that have not ended
    int due = 0;                             // calls that it makes later, whatever ends
    std::vector<JoinState> joins;            // by place in the program
    bool held_up = false;                    // before a phase, by one of them
    std::map<int, std::vector<Call>> after;  // place → calls to make when that one has ended
    std::map<uint64_t, std::shared_ptr<Running>> running;
    std::map<std::string, std::string> group_ids;  // by name in the program
    std::map<std::string, uint32_t> set_ids;
    Status failure;
    Outcome outcome = Outcome::kNone;  // when it failed
    // Behind the commit gate: how often each bucket of a group ended OK.
    std::map<std::string, std::map<int, int>> applied;
    int64_t failed_us = -1;
    bool finished = false;  // the program is over
    bool left = false;
    int64_t leave_by_us = 0;
  };

  void Build(uint64_t seed);
  void Plan();
  void PlanFault();
  bool Asleep(const Rank& rank) const {
    return rank.state != State::kRuns || rank.stalled_until_us > queue_.now_us();
  }
  // Runs `body` on the rank at a time, or when the rank runs again; not at all when it is dead.
  void OnRank(int rank, int64_t at_us, std::function<void(Rank*)> body);
  void WakeRank(int rank);
  void Turn(Rank* rank);
  void ScheduleTurn(int rank, int64_t at_us);
  void StartPhase(Rank* rank);
  bool CallJoins(Rank* rank);  // before a phase; false: one holds it up
  void EndJoin(Rank* rank, const Running& running);
  void EndPhase(Rank* rank);
  void SubmitAt(Rank* rank, int64_t at_us, const Call& call, int join = -1);
  void Submit(Rank* rank, const Call& call, int join = -1);
  void ReportBlocked(Rank* rank);
  void Done(Rank* rank, const std::shared_ptr<Running>& running, const Status& status);
  void EndProgram(Rank* rank);
  void Kill(int rank, bool silent);
  void Stop(int rank);
  void Continue(int rank);
  void CheckLinks(const Rank& rank);
  void CheckEnd();
  void CheckVerdict();
  bool Joins(const Rank& rank, const std::string& group) const;
  void Violation(const std::string& text);
  void Trace(const std::string& text);
  void Digest(uint64_t value) { result_.digest = (result_.digest ^ value) * 0x100000001b3u; }

  Rank& At(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  SimPipe& Pipe(int from, int to) { return *pipes_[static_cast<size_t>(from * size_ + to)]; }

  Rng rng_;
  EventQueue queue_;
  const bool tracing_;
  int size_ = 2;
  Config config_;
  Program program_;
  std::vector<std::shared_ptr<SimPipe>> pipes_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  bool may_fail_ = false;  // a fault that ends the work of some rank
  int64_t fault_us_ = 0;   // the last moment at which something happens from outside
  int64_t death_us_ = -1;
  std::pair<size_t, int> skipped_ = {0, -1};  // phase, rank: it leaves out an operation
  std::string skipped_key_;
  std::pair<size_t, int> altered_ = {0, -1};         // phase, rank: it has another shape
  std::map<size_t, std::pair<int, int>> join_ends_;  // by place: what the first rank was told
  uint64_t next_id_ = 1;
  EngineResult result_;
};

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_ENGINE_WORLD_H_
