// DeadlineWatch: operations that last too long: warnings, and the end of the work when a deadline
// has passed.
#ifndef TFDIST_OPS_SCHEDULER_DEADLINE_WATCH_H_
#define TFDIST_OPS_SCHEDULER_DEADLINE_WATCH_H_

#include <cstdint>

#include "base/config.h"
#include "scheduler/control_lane.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/pending_requests.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/step_gate.h"
#include "scheduler/world.h"

namespace tfdist {

class DeadlineWatch {
 public:
  // The parts of the engine that this class uses. All must outlive it.
  struct Access {
    const World& world;
    const Config& config;
    const EngineState& state;
    const ProcessSetRegistry& sets;
    const PendingRequests& pending;
    const StepGate& gate;
    ControlLane* control;
    FailureSink* failures;
  };
  explicit DeadlineWatch(const Access& access) : access_(access) {}

  // Restarts the timeout of operations whose data are moving.
  void Prolong(int64_t now_us);
  // As the leader of a set: warns of what waits for ranks, and ends the work when something has
  // waited past its deadline.
  void WarnOfStalls(ProcessSet* set);
  void EndExpired(const ProcessSet& set, int64_t now_us);
  // As any rank, a little later: ends the work when the leader has not.
  void EndLate(int64_t now_us);

 private:
  const Access access_;
  int64_t prolonged_us_ = 0;  // when Prolong was last called
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_DEADLINE_WATCH_H_
