// PredictedOperations: starts operations without a word, and finds out who is missing when one
// stands still. The rules of prediction are in ticket_order.h, the leader's knowledge in
// stall_tracker.h.
#ifndef TFDIST_OPS_SCHEDULER_PREDICTED_OPERATIONS_H_
#define TFDIST_OPS_SCHEDULER_PREDICTED_OPERATIONS_H_

#include <cstdint>
#include <memory>

#include "scheduler/control_lane.h"
#include "scheduler/departures.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/join_protocol.h"
#include "scheduler/operation_runner.h"
#include "scheduler/process_set.h"
#include "scheduler/stall_tracker.h"
#include "scheduler/wire.h"

namespace tfdist {

class PredictedOperations {
 public:
  // The parts of the engine that this class uses. All must outlive it.
  struct Access {
    int rank = 0;
    const EngineState& state;
    ControlLane* control;
    Departures* departures;
    JoinProtocol* joins;
    OperationRunner* runner;
    FailureSink* failures;
  };
  explicit PredictedOperations(const Access& access) : access_(access) {}

  void Start(ProcessSet* set, std::unique_ptr<Request> request, int64_t now_us);
  // The operation is complete here.
  void OnEnd(ProcessSet* set, uint64_t ticket);
  // Tells the leader of operations that stand still.
  void Tick(ProcessSet* set);
  // On the leader: a rank waits.
  void OnWait(ProcessSet* set, int rank, WaitNote note);
  // The leader asks how far this rank is with a ticket.
  void OnProbe(ProcessSet* set, uint64_t ticket);
  // On the leader: how far a rank is.
  void OnAnswer(ProcessSet* set, int rank, const ProbeNote& note);
  // On the leader: ends the work if ranks wait for one that does something else.
  void CheckMismatch(ProcessSet* set);

  uint64_t started() const { return started_; }
  uint64_t probes_sent() const { return probes_sent_; }

 private:
  static StallTracker::Answer Answer(ProcessSet* set, uint64_t ticket);
  void SendAnswer(ProcessSet* set, uint64_t ticket, StallTracker::Answer answer);

  const Access access_;
  uint64_t started_ = 0;  // without agreement
  uint64_t probes_sent_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_PREDICTED_OPERATIONS_H_
