// DataLane: the data frames that come from the peers: which operation each belongs to, and how many
// of them lie in the memory of the links until their operation has used them.
#ifndef TFDIST_OPS_SCHEDULER_DATA_LANE_H_
#define TFDIST_OPS_SCHEDULER_DATA_LANE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "membership/heartbeat.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/operation.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/timeline_recorder.h"
#include "scheduler/world.h"

namespace tfdist {

class DataLane {
 public:
  // The parts of the engine that the data lane uses. All must outlive it.
  struct Access {
    const World& world;
    const Links& links;
    const EngineState& state;
    ProcessSetRegistry* sets;
    HeartbeatMonitor* monitor;
    TimelineRecorder* recorder;
    FailureSink* failures;
  };
  explicit DataLane(const Access& access);

  // Whether Read would find a frame of any peer, as far as the links can tell without reading.
  bool HasFrame() const;
  // Hands what has come from a peer to its operations. True: something has.
  bool Read(int peer, int64_t now_us);
  // Copies out the frames that fill up a link and stand still. True: some did.
  bool EmptyFullLinks(int64_t now_us);
  // Copies out all frames of a peer, whose link is about to go.
  void CopyFrames(int peer);
  // Hands an operation the frames that came for it before it began.
  void DeliverEarly(ProcessSet* set, Operation* operation, int64_t now_us);
  // Hands back all frames that a set holds.
  void ReleaseFrames(ProcessSet* set);
  // While this rank sleeps, frames that fill up a link count as standing still at once.
  void SetAsleep(bool asleep) { asleep_ = asleep; }
  // The count of held frames, by peer, for Operation::Advance.
  std::vector<size_t>* held() { return &held_; }

 private:
  Status Receive(int peer, const InFrame& frame, int64_t now_us);
  // Copies out a peer's frames among those that came before their operation.
  bool CopyEarly(std::vector<std::pair<int, Arrived>>* frames, int peer);

  const World& world_;
  const Links& links_;
  const EngineState& state_;
  ProcessSetRegistry& sets_;
  HeartbeatMonitor& monitor_;
  TimelineRecorder& recorder_;
  FailureSink& failures_;
  std::vector<size_t> held_;            // frames held in the transport, by peer
  std::vector<int64_t> full_since_us_;  // since when no more can be held, by peer; 0: more can
  bool asleep_ = false;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_DATA_LANE_H_
