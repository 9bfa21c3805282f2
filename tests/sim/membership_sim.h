// Ranks that train and fail, in one thread: every rank runs the real state machines of
// tfdist_ops/membership (heartbeat, agreement, commit gate) over simulated wires, clocks and
// processes. One seed decides the world, its delays, the faults and their moments. What must hold
// is checked whenever a rank releases a step or ends a generation, and once everything is quiet.
#ifndef TFDIST_TESTS_SIM_MEMBERSHIP_SIM_H_
#define TFDIST_TESTS_SIM_MEMBERSHIP_SIM_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "membership/commit.h"
#include "membership/failure_consensus.h"
#include "membership/heartbeat.h"
#include "wires.h"

namespace tfdist::sim {

struct MembershipResult {
  std::string violation;  // empty: everything held
  std::vector<std::string> trace;
  std::string single_fault;              // its kind, where there was exactly one
  int64_t detection_us = -1;             // from it to the last verdict of a rank it did not touch
  int verdicts = 0;                      // generations that ended in agreement
  int outcomes[6] = {0, 0, 0, 0, 0, 0};  // ranks, by Outcome
  int64_t steps = 0;                     // of group 0 that a rank applied, at most
};

std::string Text(const Verdict& verdict);

class MembershipSim {
 public:
  MembershipSim(uint64_t seed, bool trace);
  MembershipResult Run();

 private:
  struct Letter {
    enum class Kind : uint8_t { kBeat, kConsensus, kGate, kData, kEnd, kGone, kCompute };
    Kind kind;
    uint32_t generation = 0;
    Heartbeat beat;
    FailureConsensus::Message message;
    GateMessage gate;
    uint64_t group = 0;
    int64_t step = 0;
    bool certain = false;
  };
  struct Generation {
    uint32_t id = 0;
    std::vector<int> members;
    std::unique_ptr<HeartbeatMonitor> monitor;
    std::unique_ptr<FailureConsensus> consensus;
    std::unique_ptr<CommitGate> gate;
    std::map<uint64_t, int64_t> running;   // group → step
    std::map<uint64_t, int64_t> complete;  // group → step, for the checks
    std::map<uint64_t, int64_t> started_us;
    std::map<std::pair<uint64_t, int64_t>, std::set<int>> contributed;
    std::map<int, uint32_t> beats_read;  // by peer, for the checks
    int agreement_messages = 0;
  };
  enum class State : uint8_t { kRuns, kStopped, kDead };
  using Step = std::pair<uint32_t, int64_t>;  // generation, step
  struct Node {
    int rank = 0;
    int host = 0;
    State state = State::kRuns;
    int64_t stalled_until_us = 0;
    bool tick_due = false;
    bool finished = false;  // it is out, and waits for the end of its process
    std::deque<std::pair<int, Letter>> inbox;
    std::vector<std::pair<int, Letter>> outbox;  // of a rank that was stopped while it sent
    std::vector<std::pair<int, Letter>> early;   // of a generation that this rank has not reached
    Generation now;
    std::map<uint32_t, std::shared_ptr<const Verdict>> decided;
    std::map<uint32_t, bool> barred;  // by generation; false: it has claimed its verdict
    std::map<int, bool> ended;        // links: rank → certain
    std::map<uint64_t, std::vector<Step>> applied;  // by group
    int64_t last_applied_us = 0;
    int64_t outcome_us = -1;  // of the first generation
    // The fault that hits it after so many more messages of a kind (0: any kind).
    enum class Armed : uint8_t { kKill, kStop, kIsolate };
    Armed armed = Armed::kKill;
    int armed_sends = -1;
    int armed_kind = 0;
  };

  // Faults (membership_faults.cc).
  void Plan();
  void PlanSingle();
  void PlanSlow();
  void PlanMany();
  void AddFault(int64_t at_us);
  void Partition(const std::vector<bool>& side, int64_t at_us, int64_t heal_us, bool one_way);
  void CutPair(int a, int b, int64_t at_us, int64_t heal_us, bool one_way);
  void Isolate(int rank, int64_t heal_us);
  void Spring(Node* node, int to, const Letter& letter);
  void StopAt(int rank, int64_t at_us, int64_t continue_us);
  void StallAt(int rank, int64_t at_us, int64_t length_us);
  void FreezeJob(int64_t at_us, int64_t length_us);
  void ResetPair(int a, int b, int64_t at_us);
  void KillHost(int host, int64_t at_us);

  // The world.
  void Enter(Node* node, uint32_t generation, const std::vector<int>& members);
  void Send(Node* node, int to, Letter letter);
  void Arrive(int from, int to, const Letter& letter);
  void Handle(Node* node, int from, const Letter& letter);
  void Flow(Node* node);  // sends what the machines want to send, looks at their results
  void Tick(Node* node);
  void ScheduleTick(int rank);
  void Wake(Node* node);
  bool Asleep(const Node& node) const {
    return node.state != State::kRuns || node.stalled_until_us > queue_.now_us();
  }
  bool Live(const Node& node) const { return node.state == State::kRuns && !node.finished; }
  void Kill(Node* node, bool silent);
  void Stop(Node* node);
  void Continue(Node* node);
  void Finish(Node* node);
  void StartStep(Node* node, uint64_t group);
  void Contribute(Node* node, uint64_t group, int64_t step);
  void NoteContribution(Node* node, int from, uint64_t group, int64_t step);
  void Suspect(Node* node, std::vector<Evidence> evidence);
  void CheckDeadlines(Node* node);
  ProcessState StateOf(const Node& node) const;

  // Invariants (membership_checks.cc).
  void CheckRelease(const Node& node, const CommitPoint& point);
  void CheckVerdict(const Node& node, const Verdict& verdict);
  void CheckSuspicion(const Node& node, int peer);
  void CheckOutcome(const Node& node);
  bool LinkDown(const std::vector<int>& members);
  void CheckEnd();
  void Violation(const std::string& text);
  void Trace(const std::string& text);

  Node& At(int rank) { return nodes_[static_cast<size_t>(rank)]; }
  int64_t& Disturbed(int rank) { return disturbed_us_[static_cast<size_t>(rank)]; }

  Rng rng_;
  EventQueue queue_;
  const bool tracing_;
  int size_ = 2;
  int hosts_ = 1;
  int groups_ = 1;
  bool launcher_ = false;  // tells everybody which processes have ended
  bool quiet_ = false;     // training has stopped
  std::unique_ptr<Wires<Letter>> wires_;
  std::vector<Node> nodes_;
  std::vector<int64_t> disturbed_us_;  // when a rank was last stopped, cut off or starved too long
  std::map<std::pair<int, int>, int64_t> cut_us_;  // when a wire was last cut
  int64_t last_fault_us_ = 0;
  int64_t single_us_ = -1;
  bool slow_only_ = false;        // nothing may end
  bool undisturbed_ = true;       // no stop, stall, cut or reset: no rank may end without agreement
  bool uncertain_ = false;        // a failure that is not certain
  std::set<int> expect_decided_;  // by the single fault
  MembershipResult result_;
};

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_MEMBERSHIP_SIM_H_
