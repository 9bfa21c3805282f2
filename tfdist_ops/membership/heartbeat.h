// Heartbeat: which peers show no sign of life. A pure state machine: no clock, no sockets, no
// threads. It turns silence and process states into Evidence; membership/failure_consensus.h
// decides.
//
// Duties of the caller, all on one thread:
//   - call Tick(now_us) at least once a period, send the returned beats on the control lane, and
//     hand the returned evidence to FailureConsensus::AddEvidence;
//   - before Tick, for every peer in WantProcessState(), read the state of its process
//     (/proc/PID/stat; same host only) and call SetProcessState;
//   - call Receive(peer, beat) for every beat, OnFrame(peer) for every other frame of a watched
//     peer;
//   - call WatchAll() when the agreement has begun (FailureConsensus::active()), so that it is
//     noticed if a member that the coordinator waits for is silent;
//   - call Forget(peer) for a peer whose fate is known.
//
// Silence is counted only while this rank's own ticks come on schedule (OwnTime), so that a rank
// that was itself stopped or starved of CPU time does not suspect the others. On the same host, a
// process that is known to run (states R, S, D) is never suspected: an overloaded machine is not a
// dead one.
//
// Source: an unreliable failure detector in the sense of T. D. Chandra, S. Toueg, "Unreliable
// Failure Detectors for Reliable Distributed Systems", J. ACM 43 (1996).
#ifndef TFDIST_OPS_MEMBERSHIP_HEARTBEAT_H_
#define TFDIST_OPS_MEMBERSHIP_HEARTBEAT_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tfdist {

// Why a rank is believed to have failed.
struct Evidence {
  int rank = -1;  // kNoRank: the generation must end although no rank is out
  // True only if the rank can never act again in this generation: its process is gone (according to
  // the operating system or the launcher of its host), the rank has itself reported that it is out,
  // or it was barred from deciding while it was stopped (Link::BarPeer). The end or reset of a
  // connection to another host is NOT certain: both ends can see it while both are alive.
  bool certain = false;
  std::string cause;
  // The error for the user, as the first rank that saw the failure wrote it. Opaque here.
  std::string record{};
};
constexpr int kNoRank = -1;

// Time measured by this rank's own ticks. A gap longer than twice the period, in which this process
// probably did not run, counts as one period.
class OwnTime {
 public:
  explicit OwnTime(int64_t period_us) : period_us_(period_us) {}
  // Microseconds to count since the last call; 0 at the first call.
  int64_t Advance(int64_t now_us);

 private:
  const int64_t period_us_;
  int64_t last_us_ = -1;
};

// The ranks that `rank` watches, and that watch it: all others up to 8 ranks, else those at
// distances 2^k (mod size), on both sides; sorted.
std::vector<int> WatchedRanks(int rank, int size);

struct HeartbeatOptions {
  int64_t period_us = 100 * 1000;
  int64_t silence_us = 2000 * 1000;  // for a peer whose process state cannot be read
  // A peer with a smaller rank gets this much more time: if two ranks have lost only each other,
  // the smaller one reports the other first, which learns of it from the rest and reports nobody.
  int64_t yield_us = 300 * 1000;
  // Silent peers are reported together: a report waits while another peer is within this time of
  // its limit, so that a rank that is cut off from many does not report them one by one.
  int64_t gather_us = 500 * 1000;
  int64_t stopped_us = 1000 * 1000;  // how long a process of this host must be stopped
  int64_t look_us = 300 * 1000;      // silence after which the process state is asked for
  int max_unacknowledged = 4;        // so that the lane to a peer that reads nothing never fills
};

// While max_unacknowledged beats are unacknowledged, only acknowledgements are sent, which repeat
// the last sequence. Otherwise two ranks whose link was cut for a moment would wait for each other.
struct Heartbeat {
  uint32_t sequence = 0;      // of the sender, from 1
  uint32_t acknowledged = 0;  // highest sequence the sender has read from the receiver
};

enum class ProcessState : uint8_t {
  kUnknown,  // cannot be looked at: another host, another namespace
  kRunning,  // R, S, D
  kStopped,  // T, t
  kGone,     // no such process, Z, X, or another start time
};

class HeartbeatMonitor {
 public:
  struct Turn {
    std::vector<std::pair<int, Heartbeat>> beats;  // to send, by peer
    std::vector<Evidence> evidence;                // each peer once
  };

  // `members`: the ranks of the generation, sorted, this one included; `same_host`: for each
  // of `members`, in their order, whether SetProcessState will be called when wanted.
  HeartbeatMonitor(int rank, const std::vector<int>& members, const std::vector<bool>& same_host,
                   const HeartbeatOptions& options = {});

  void OnFrame(int peer);
  void Receive(int peer, const Heartbeat& beat);
  void SetProcessState(int peer, ProcessState state);
  std::vector<int> WantProcessState() const;
  void WatchAll();
  void Forget(int peer) { peers_.erase(peer); }
  Turn Tick(int64_t now_us);

 private:
  struct Peer {
    bool same_host = false;
    bool watched = false;
    bool suspected = false;
    ProcessState state = ProcessState::kUnknown;
    int64_t silent_us = 0;
    int64_t stopped_us = 0;
    uint32_t sent = 0;          // sequence of our last beat
    uint32_t acknowledged = 0;  // highest of ours that the peer has read
    uint32_t read = 0;          // highest of the peer's that we have read
    uint32_t told = 0;          // of these, the highest that we have acknowledged
  };
  int64_t Limit(int rank) const;
  bool Judge(int rank, Peer* peer, int64_t passed_us, Evidence* evidence) const;
  bool Gathering() const;

  const int rank_;
  const HeartbeatOptions options_;
  OwnTime own_;
  int64_t next_beat_us_ = 0;
  std::map<int, Peer> peers_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_MEMBERSHIP_HEARTBEAT_H_
