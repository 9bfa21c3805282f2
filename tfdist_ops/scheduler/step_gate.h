// StepGate: with TFDIST_ATOMIC_STEPS=1 the `done`s of a step of gradients wait here until every
// rank of the set has the whole step (membership/commit.h). Only `done` waits; frames and memory do
// not.
#ifndef TFDIST_OPS_SCHEDULER_STEP_GATE_H_
#define TFDIST_OPS_SCHEDULER_STEP_GATE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "membership/commit.h"
#include "membership/failure_consensus.h"
#include "scheduler/control_lane.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/pending_requests.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/request_flow.h"
#include "scheduler/world.h"

namespace tfdist {

class StepGate {
 public:
  // The parts of the engine that this class uses. All must outlive it.
  struct Access {
    const World& world;
    const Config& config;
    const EngineState& state;
    const ProcessSetRegistry& sets;
    ControlLane* control;
    FailureSink* failures;
    RequestFlow* requests;
  };
  explicit StepGate(const Access& access) : access_(access) {}

  // An error: steps of the request can't be counted.
  Status Check(const Request& request) const;
  // Whether the request may run now; else its step comes later: see Postpone.
  bool Admit(ProcessSet* set, const Request& request);
  void Postpone(ProcessSet* set, std::unique_ptr<Request> request);
  // An operation of this rank is over: it finishes, or is held back.
  void End(ProcessSet* set, std::unique_ptr<Request> request, const Status& status, int64_t now_us);

  void OnMessage(ProcessSet* set, int peer, const GateMessage& message, int64_t now_us);
  void SendMessages();

  // For the agreement about a failure: from here on no step is released but by the verdict.
  std::vector<CommitPoint> Freeze();
  // Releases the steps that count. An error is a bug: end with it rather than apply a torn step.
  Status Resolve(const FailureConsensus& consensus, int64_t now_us);
  // Hands over what is still held.
  void TakeHeld(PendingRequests* pending);

  // Whether the gate holds it: its own work is done.
  static bool Holds(const ProcessSet& set, const Request& request);
  // A step that the gate has held past its deadline, which was before limit_us.
  std::optional<Stall> ExpiredStep(const ProcessSet& set, int64_t limit_us, int64_t now_us) const;
  uint64_t messages_sent() const { return messages_sent_; }

 private:
  void Send(ProcessSet* set);
  void Release(ProcessSet* set, int64_t now_us);

  const Access access_;
  uint64_t messages_sent_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_STEP_GATE_H_
