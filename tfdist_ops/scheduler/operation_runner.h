// OperationRunner: runs the operations of this rank: starts what the ranks have agreed on, or need
// not agree on, and moves it on until it is complete.
#ifndef TFDIST_OPS_SCHEDULER_OPERATION_RUNNER_H_
#define TFDIST_OPS_SCHEDULER_OPERATION_RUNNER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/config.h"
#include "scheduler/data_lane.h"
#include "scheduler/engine_hooks.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/operation.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/request_flow.h"
#include "scheduler/timeline_recorder.h"
#include "scheduler/world.h"

namespace tfdist {

class OperationRunner {
 public:
  // The parts of the engine that this class uses. All must outlive it.
  struct Access {
    const World& world;
    const Config& config;
    const Links& links;
    const EngineState& state;
    const ProcessSetRegistry& sets;
    const EngineHooks& hooks;
    TimelineRecorder* recorder;
    DataLane* data_lane;
    FailureSink* failures;
    RequestFlow* requests;
  };
  // Operations that are complete, and their requests.
  struct Completed {
    std::vector<uint64_t> tickets;
    std::vector<std::unique_ptr<Request>> requests;
  };
  explicit OperationRunner(const Access& access) : access_(access) {}

  // Starts an operation, whose requests were fused if there are several.
  void Start(ProcessSet* set, uint64_t ticket, std::vector<std::unique_ptr<Request>> members,
             int64_t now_us);
  // Restarts the operation that was kept for the request's bucket. False: there is none that fits.
  bool StartKept(ProcessSet* set, std::unique_ptr<Request>* request, int64_t now_us);
  // Asks for the memory of an output, now that its size is known; OnAllocated starts the operation.
  void Allocate(ProcessSet* set, std::unique_ptr<Request> request, const Response& response,
                int64_t now_us);
  void OnAllocated(uint32_t set, uint64_t ticket, void* memory, int64_t now_us);
  // Moves on what can move, and adds what is complete then. True: something moved.
  bool Advance(ProcessSet* set, int64_t now_us, Completed* completed);

 private:
  // Delivers the frames that have come already. False: the work has ended, and the operation too.
  bool DeliverEarly(ProcessSet* set, Operation* operation, int64_t now_us);

  const Access access_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_OPERATION_RUNNER_H_
