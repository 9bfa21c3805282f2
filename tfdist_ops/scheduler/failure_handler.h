// FailureHandler: who is alive, and one verdict about a failure: it turns what this rank sees into
// evidence, carries the messages of the agreement (membership/), and ends the work when there is an
// outcome.
#ifndef TFDIST_OPS_SCHEDULER_FAILURE_HANDLER_H_
#define TFDIST_OPS_SCHEDULER_FAILURE_HANDLER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "membership/failure_consensus.h"
#include "membership/heartbeat.h"
#include "scheduler/control_lane.h"
#include "scheduler/departures.h"
#include "scheduler/engine_state.h"
#include "scheduler/failure_sink.h"
#include "scheduler/operation.h"
#include "scheduler/pending_requests.h"
#include "scheduler/step_gate.h"
#include "scheduler/world.h"

namespace tfdist {

using ProcessStateOf = std::function<ProcessState(int peer)>;  // as EngineHooks::process_state

HeartbeatMonitor MakeHeartbeatMonitor(const World& world, const Config& config,
                                      const ProcessStateOf& process_state);

class FailureHandler : public FailureSink {
 public:
  // The owner of the work: it stops and ends the work.
  class Client {
   public:
    virtual ~Client() = default;
    // Nothing runs any more; what is pending waits.
    virtual void StopWork() = 0;
    // The end of all work: with `failure` for what is submitted from now on, `pending` for the
    // rest.
    virtual void EndAll(const Status& failure, const Status& pending, int64_t now_us) = 0;
  };
  // The parts of the engine that this class uses. All must outlive it.
  struct Access {
    const World& world;
    const Config& config;
    const Links& links;
    const EngineState& state;
    const PendingRequests& pending;
    const ProcessStateOf& process_state;
    HeartbeatMonitor* monitor;
    ControlLane* control;
    StepGate* gate;
    Departures* departures;
    Client* client;
  };
  explicit FailureHandler(const Access& access);

  // ---- evidence ----
  void Suspect(int rank, bool certain, const Status& status) override;
  void ReportBug(const Status& status, int64_t now_us) override;
  // The process of the peer has ended, although its link may not say so.
  void OnProcessEnded(int peer) { process_ended_[static_cast<size_t>(peer)] = true; }
  bool HasProcessEnded(int peer) const { return process_ended_[static_cast<size_t>(peer)]; }
  // The connection to a peer that had not left has ended.
  void OnConnectionLost(int peer, const Status& reason, int64_t now_us);
  // The link to the peer is about to go: settles whether the peer has barred this rank from
  // deciding.
  void SettleVerdict(int peer);

  // ---- this rank's own failure ----
  // Its operations end with `mine` now, the others hear `theirs`.
  void Withdraw(const Status& mine, const Status& theirs, int64_t now_us);
  // As the other ranks see it.
  Status FailureOf(int rank, const std::string& cause, const std::string& detail) const;

  // ---- the agreement ----
  void OnMessage(int peer, const ConsensusMessage& message);
  void Advance(int64_t now_us);
  void Tick(int64_t now_us);
  const FailureConsensus& consensus() const { return consensus_; }
  // Whether the ranks are still agreeing on a failure.
  bool undecided() const { return consensus_.active() && consensus_.outcome() == Outcome::kNone; }
  // Whether a connection has just ended and the process at its other end is being looked at.
  bool doubting() const;

 private:
  struct Lost {
    int64_t since_us = 0;
    bool local = false;  // the connection can only end with the process
    bool suspected = false;
    Status reason;
  };

  std::vector<CommitPoint> Freeze();
  bool ClaimVerdict();
  bool BarIfStopped(int peer);
  ProcessState LookAt(int peer) const;
  Status RankFailed(int rank, const std::string& cause, const std::string& detail) const;
  void ClassifyLostPeers(int64_t now_us);
  void CountOutLeavers();
  void SendMessages();
  void Flush();
  void CheckOutcome(int64_t now_us);

  const Access access_;
  std::vector<bool> process_ended_;  // by peer
  std::map<int, Lost> lost_;         // peers whose connection ended, until their death is certain
  std::vector<Evidence> seen_;       // in this turn
  FailureConsensus consensus_;
  bool barred_ = false;  // some peer has barred this rank from deciding
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_FAILURE_HANDLER_H_
