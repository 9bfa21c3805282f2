// EngineHooks: the callbacks from an engine to its owner.
#ifndef TFDIST_OPS_SCHEDULER_ENGINE_HOOKS_H_
#define TFDIST_OPS_SCHEDULER_ENGINE_HOOKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "membership/heartbeat.h"
#include "scheduler/operation.h"
#include "scheduler/request_info.h"

namespace tfdist {

class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  virtual void Post(std::function<void()> callback) = 0;
};

struct EngineHooks {
  CompletionSink* completions = nullptr;
  // Memory for an output has come (called on the completion thread); must lead to Engine::Allocated
  // with the same arguments on the engine's thread.
  std::function<void(uint32_t set, uint64_t ticket, void* memory)> allocated;
  // Once, when work ends; before the operations that end with it.
  std::function<void(const Status&)> failed;
  std::function<void(const Request& request, Code code)> finished;
  // Asked when the end of work, with `failure`, ends an operation of this rank's program. True: the
  // operation has a result now, and ends well.
  std::function<bool(const Request& request, const Status& failure)> hide_failure;
  // A request whose `done` has run on the thread that drives the engine: its memory can be used
  // for another one.
  std::function<void(std::unique_ptr<Request>)> spent;
  // On a rank that has joined: the others have registered a group.
  std::function<void(const RequestInfo& info, const Response& response)> registered;
  std::function<void(int64_t count)> stepped;  // complete steps of a group so far
  // At every tick: Engine::moves(), and for how long it has not changed while operations of this
  // rank wait; 0: none waits.
  std::function<void(uint64_t moves, int64_t still_us)> still;
  // Lines of a peer's timeline; on rank 0.
  std::function<void(int peer, std::string lines)> timeline_lines;
  // The state of a peer's process now; kUnknown if it cannot be seen for certain. Null: kUnknown
  // for all peers.
  std::function<ProcessState(int peer)> process_state;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_ENGINE_HOOKS_H_
