// JoinProtocol: ranks without data: finding out that one has joined a process set, and taking part
// in the operations of the others when this one has. The rules are in join.h.
#ifndef TFDIST_OPS_SCHEDULER_JOIN_PROTOCOL_H_
#define TFDIST_OPS_SCHEDULER_JOIN_PROTOCOL_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "base/span.h"
#include "scheduler/control_lane.h"
#include "scheduler/departures.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/join.h"
#include "scheduler/process_set.h"
#include "scheduler/request_flow.h"
#include "scheduler/step_gate.h"
#include "scheduler/wire.h"
#include "scheduler/world.h"

namespace tfdist {

class JoinProtocol {
 public:
  // The parts of the engine that this class uses. All must outlive it. `registered`: see
  // EngineHooks.
  struct Access {
    const World& world;
    const EngineState& state;
    ControlLane* control;
    Departures* departures;
    StepGate* gate;
    FailureSink* failures;
    RequestFlow* requests;
    const std::function<void(const RequestInfo& info, const Response& response)>& registered;
  };
  explicit JoinProtocol(const Access& access) : access_(access) {}

  // Goes on with this rank's own join.
  void Advance(ProcessSet* set, int64_t now_us);
  // False: the message does not parse, or can't come from that peer.
  bool OnMessage(int peer, FrameType type, ProcessSet* set, ByteSpan message, int64_t now_us);
  // A predicted operation has started here, in which a rank that has joined is to take part.
  void OnStarted(ProcessSet* set, uint64_t ticket, const RequestInfo& info, int64_t now_us);
  // Whether this rank, which has joined, is asked to take part in an announced operation.
  bool IsAsked(const ProcessSet& set, const Response& response) const;
  // This rank's part in it. Null: the work has ended.
  std::unique_ptr<Request> TakePartInAnnounced(ProcessSet* set, const RequestInfo& info,
                                               uint32_t number, const Response& response,
                                               int64_t now_us);

 private:
  void Add(ProcessSet* set, JoinNote note, int64_t now_us);
  void OnJoin(ProcessSet* set, const JoinNote& note, int64_t now_us);
  void End(ProcessSet* set, const JoinNote& note);
  void Finish(ProcessSet* set);
  void SendOrders(ProcessSet* set, int64_t now_us);
  void Prolong(ProcessSet* set) const;
  void TakePartInPredicted(ProcessSet* set, const WaitNote& order, int64_t now_us);
  std::unique_ptr<Request> MakeRequest(ProcessSet* set, const RequestInfo& info, int64_t now_us);

  const Access access_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_JOIN_PROTOCOL_H_
