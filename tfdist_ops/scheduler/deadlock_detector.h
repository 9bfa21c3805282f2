// DeadlockDetector: ranks that wait for each other: what this rank says of itself, and rank 0's
// decision. The rule is in deadlock.h.
#ifndef TFDIST_OPS_SCHEDULER_DEADLOCK_DETECTOR_H_
#define TFDIST_OPS_SCHEDULER_DEADLOCK_DETECTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "scheduler/control_lane.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/wire.h"

namespace tfdist {

class DeadlockDetector {
 public:
  // The parts of the engine that this class uses. All must outlive it. `still`: see EngineHooks.
  struct Access {
    int rank = 0;
    const EngineState& state;
    const ProcessSetRegistry& sets;
    ControlLane* control;
    FailureSink* failures;
    const std::function<void(uint64_t moves, int64_t still_us)>& still;
  };
  explicit DeadlockDetector(const Access& access) : access_(access) {}

  // Says for how long nothing has moved on this rank.
  void Tick(int64_t own_us);
  // As Engine::ReportBlocked.
  void ReportBlocked(uint64_t moves, BlockedNote::How how, std::string place);
  // On rank 0: what a rank says of itself.
  void OnNote(int rank, BlockedNote note);
  // Rank 0 asks whether this rank is still blocked.
  void OnProbe(uint32_t round) { SendNote(round); }

 private:
  std::vector<BlockedWait> Waiting() const;
  std::vector<LedWait> LedWaits() const;
  void SendNote(uint32_t round);
  void Probe();
  void EndDeadlock();

  const Access access_;
  uint64_t noted_moves_ = 0;  // at the last tick
  int64_t still_since_us_ = 0;
  std::optional<BlockedNote> blocked_;  // of this rank's program; valid until `moves` changes
  // From here on, used on rank 0 only. The last note of each rank.
  std::map<int, BlockedNote> notes_;
  uint32_t round_ = 0;
  std::set<int> unanswered_;  // ranks that were asked whether they are still blocked
  bool holds_ = false;        // all that have answered are still blocked
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_DEADLOCK_DETECTOR_H_
