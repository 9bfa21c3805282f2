// Departures: ranks that shut down: the goodbyes of the peers, what this rank still needs of those
// that have left, and its own goodbye.
#ifndef TFDIST_OPS_SCHEDULER_DEPARTURES_H_
#define TFDIST_OPS_SCHEDULER_DEPARTURES_H_

#include <vector>

#include "membership/heartbeat.h"
#include "scheduler/control_lane.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/operation.h"
#include "scheduler/pending_requests.h"
#include "scheduler/process_set_registry.h"
#include "scheduler/wire.h"
#include "scheduler/world.h"

namespace tfdist {

class Departures {
 public:
  // The parts of the engine that this class uses. All must outlive it.
  struct Access {
    const World& world;
    const Links& links;
    const EngineState& state;
    const ProcessSetRegistry& sets;
    const PendingRequests& pending;
    HeartbeatMonitor* monitor;
    ControlLane* control;
    FailureSink* failures;
  };
  explicit Departures(const Access& access);

  // ---- peers ----
  void OnGoodbye(int peer, LeaveNote took_part);
  // The peer has answered our goodbye.
  void OnAnswer(int peer) { peers_[static_cast<size_t>(peer)].acknowledged = true; }
  // The link of the peer is gone.
  void OnLost(int peer);
  // The peer said goodbye, or is lost.
  bool HasLeft(int peer) const { return peers_[static_cast<size_t>(peer)].left; }
  // Peers that have said goodbye, each once.
  std::vector<int> TakeGoodbyes();
  // Answers the goodbyes of peers of which nothing is unread.
  void AnswerGoodbyes();

  // ---- operations that a peer that has left will not take part in: the work ends ----
  // Something here needs the peer.
  void ReportMissed(int peer);
  // Operations that this rank, as a leader, waits for.
  void CheckAnnounced();
  // The predicted operations that run here.
  void CheckPredicted(int peer);
  // The operations that run here and await data of a peer whose link has ended. A peer that left
  // has sent its part, but not all of it may have come before its link ended.
  void CheckArrived();

  // ---- this rank ----
  void SayGoodbye();
  // Whether every peer knows, or is gone, and all bytes are out.
  bool IsGoodbyeHeard() const;

 private:
  struct Peer {
    bool left = false;  // said goodbye, or is lost
    bool said_goodbye = false;
    bool counted_out = false;   // in an agreement: a rank that has left takes no part
    bool answer_due = false;    // its goodbye has yet to be answered
    bool acknowledged = false;  // it has answered our goodbye
    LeaveNote took_part;        // what it had taken part in when it left
  };

  const Access access_;
  std::vector<Peer> peers_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_DEPARTURES_H_
