// Engine: one rank's side of everything: takes requests, agrees with the other ranks on their
// order, runs the agreed collectives, and turns the first failure into everybody's error.
//
// Not thread-safe and never blocking: Poll() does what can be done now and returns. The progress
// thread (runtime/progress.cc) or a test calls it; time comes in as an argument. Callbacks of
// requests go to the CompletionSink, except for `agreed`, and for the `done` of a `direct` request
// unless an `allocate` may still be queued: these are called from here.
//
// One request's way, in its process set:
//   Submit → entries (one queue a key) → kReady to the set's leader → Negotiator: all ready, all
//   agree → kResponse with a ticket → Operation (schedule + slices) → Advance ... → done.
// A bucket of gradients that has gone this way once starts at once from then on, without a message:
//   Submit → Operation, under a predicted ticket (ticket_order.h).
//
// Engine keeps the requests and their order; each of its other concerns is a class of its own,
// a member below. engine.cc: requests, agreement, one turn; engine_messages.cc: what other ranks
// say; engine_end.cc: failure, cancellation and leaving.
//
// A failure, from the first evidence on: the work stops (StopWork), but nothing ends; the ranks
// agree (membership/failure_consensus.h); then all that was pending ends with one error, the same
// on every survivor. Only a rank's own failure ends its own operations at once, and takes the rank
// out.
#ifndef TFDIST_OPS_SCHEDULER_ENGINE_H_
#define TFDIST_OPS_SCHEDULER_ENGINE_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/span.h"
#include "base/status.h"
#include "membership/failure_consensus.h"
#include "membership/heartbeat.h"
#include "scheduler/control_lane.h"
#include "scheduler/data_lane.h"
#include "scheduler/deadline_watch.h"
#include "scheduler/deadlock_detector.h"
#include "scheduler/departures.h"
#include "scheduler/engine_hooks.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_handler.h"
#include "scheduler/join_protocol.h"
#include "scheduler/operation.h"
#include "scheduler/operation_runner.h"
#include "scheduler/pending_requests.h"
#include "scheduler/predicted_operations.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/request_flow.h"
#include "scheduler/step_gate.h"
#include "scheduler/timeline_recorder.h"
#include "scheduler/wire.h"
#include "scheduler/world.h"

namespace tfdist {

// Why a rank's own program ends.
struct AbortReason {
  std::string cause;   // in one line
  std::string detail;  // more, e.g. a traceback
  int culprit = -1;    // the rank that caused it, if that is known; -1: this rank
};

class Engine : private ControlLane::Receiver, private RequestFlow, private FailureHandler::Client {
 public:
  using Hooks = EngineHooks;

  // No clock, no randomness: what an engine does is a function of its calls and of what its links
  // deliver.
  Engine(World world, Links links, const Config& config, Hooks hooks);
  ~Engine() override;

  // ---- commands; all on the engine's thread ----
  void Submit(std::unique_ptr<Request> request, int64_t now_us);
  void Cancel(uint64_t id, int64_t now_us);
  // This rank's own program failed: ends all work, here and everywhere.
  void AbortWith(const AbortReason& reason, int64_t now_us);
  // Ends what is pending here and tells nobody: the last call before the engine goes.
  void Stop(int64_t now_us);
  // The peer's process is known to have ended, although its connection may look open (a child of it
  // can hold a copy).
  void PeerEnded(int peer) { failures_.OnProcessEnded(peer); }
  void Allocated(uint32_t set, uint64_t ticket, void* memory, int64_t now_us) {
    runner_.OnAllocated(set, ticket, memory, now_us);
  }
  // Says goodbye; Left() turns true when every peer knows, or is gone, and all bytes are out.
  void Leave(int64_t now_us);
  bool Left() const;

  // Records all that happens from now on there; null: records nothing. The owner keeps it alive
  // until the engine is gone, or has another one.
  void SetTimeline(Timeline* timeline) { recorder_.SetTimeline(timeline); }
  // Sends lines of it to rank 0, unless too many wait to be sent already.
  void SendTimeline(std::string lines) { recorder_.SendLines(std::move(lines)); }

  // One turn. True: something moved, call again soon.
  bool Poll(int64_t now_us);
  // Time-driven duties (deadlines, stall reports, heartbeats); cheap, wanted every 50 ms or so, and
  // at least once a heartbeat.
  void Tick(int64_t now_us);
  void SetWakeMode(WakeMode mode);
  // Runs what can run without a look at what has come.
  bool AdvanceAll(int64_t now_us);

  // Hands the links what they take of the control messages that wait.
  bool FlushAll() { return control_.FlushAll(); }

  // Whether PollData would find a frame, as far as the links can tell without reading.
  bool HasFrame() const { return data_lane_.HasFrame(); }
  // The part of a turn that handles the data frames of HasFrame. True: something moved.
  bool PollData(int64_t now_us);

  bool busy() const;
  // How often something has moved on this rank: submitted, ended, or heard of as a leader.
  uint64_t moves() const { return state_.moves; }
  // Reports that the threads of this rank's program that call collectives stood at `place` when
  // moves() returned `moves`. No effect if something has moved since.
  void ReportBlocked(uint64_t moves, BlockedNote::How how, std::string place) {
    deadlocks_.ReportBlocked(moves, how, std::move(place));
  }
  // Whether an operation of this rank waits for all ranks to agree on it.
  bool agreeing() const { return sets_.agreeing(); }
  // Data frames that came before their operation, copied out and waiting for it.
  size_t stashed() const { return sets_.stashed(); }
  // Operations whose data frames are copied out because a lane was full of them.
  size_t copied() const { return sets_.copied(); }
  // Whether time matters to this rank: something waits here, or for its decision as a leader.
  bool waiting() const;
  // Whether a connection has just ended and the process at its other end is being looked at.
  bool doubting() const { return failures_.doubting(); }
  const Status& failure() const { return state_.failure; }
  const FailureConsensus& consensus() const { return failures_.consensus(); }
  const Links& links() const { return links_; }
  std::string CountersJson() const;

 private:
  // Messages of other ranks.
  void OnControlMessage(int peer, FrameType type, uint32_t set, ByteSpan message,
                        int64_t now_us) override;
  void OnBadControlFrame(int peer, int64_t now_us) override;
  bool HandleSetMessage(int peer, FrameType type, ProcessSet* set, ByteSpan message,
                        int64_t now_us);
  void EndSetChange(const Request& request, const Response& response, int64_t now_us);
  // Agreement.
  void Enqueue(ProcessSet* set, std::unique_ptr<Request> request, int64_t now_us) override;
  void Announce(ProcessSet* set, const RequestInfo& info, int64_t now_us);
  void AddReady(ProcessSet* set, int rank, RequestInfo info, int64_t now_us);
  bool SendResponses(int64_t now_us);
  void HandleResponse(ProcessSet* set, const Response& response, int64_t now_us);
  std::unique_ptr<Request> TakeEntry(ProcessSet* set, const std::string& key, bool agreed,
                                     uint32_t number, int64_t now_us);
  void StartPredicted(ProcessSet* set, std::unique_ptr<Request> request, int64_t now_us) override {
    predicted_.Start(set, std::move(request), now_us);
  }
  void Finish(std::unique_ptr<Request> request, const Status& status) override;
  bool HidesFailure(const Request& request, const Status& status) const;
  void CountStep(const Request& request);
  // Failure.
  void LosePeer(int peer, const Status& reason, int64_t now_us);
  void StopWork() override;
  void EndStopped(std::unique_ptr<Request> request) override;
  void EndAll(const Status& failure, const Status& pending, int64_t now_us) override;
  // Calls that set or check deadlines begin with it.
  void AdvanceOwnTime(int64_t now_us) { state_.own_us += own_time_.Advance(now_us); }

  const World world_;
  Links links_;
  const Config config_;
  const Hooks hooks_;
  ProcessSetRegistry sets_;
  PendingRequests pending_;
  EngineState state_;
  OwnTime own_time_;
  HeartbeatMonitor monitor_;
  ControlLane control_;
  TimelineRecorder recorder_;
  FailureHandler failures_;  // before those that report to it
  DataLane data_lane_;
  DeadlockDetector deadlocks_;
  StepGate gate_;
  Departures departures_;
  OperationRunner runner_;
  JoinProtocol joins_;
  PredictedOperations predicted_;
  DeadlineWatch deadlines_;
  // How often each bucket is done, by set and group.
  std::map<uint32_t, std::map<std::string, std::vector<int64_t>>> steps_;
  int64_t good_steps_ = 0;
  uint64_t last_ticket_ = 0;  // announced in the world
  uint64_t deviations_ = 0;   // operations that needed agreement although agreed on before
  uint64_t finished_ = 0;
  OperationRunner::Completed completed_;  // memory that AdvanceAll reuses; empty between calls
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_ENGINE_H_
