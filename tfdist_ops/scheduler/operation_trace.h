// OperationTrace: what happened to one operation on this rank, and when. The operation keeps it
// while it runs; the engine reads from it for which rank it has waited (wait_accounting.h), and
// hands it to the timeline. The times of arrivals are always kept: they cost two stores a frame.
// Times that need a clock of their own are measured only while a timeline is written.
#ifndef TFDIST_OPS_SCHEDULER_OPERATION_TRACE_H_
#define TFDIST_OPS_SCHEDULER_OPERATION_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tfdist {

using TraceClock = int64_t (*)();  // monotonic nanoseconds; null: nothing is measured

struct OperationTrace {
  // Work in pieces: when the first began, when the last ended, how long they took together.
  struct Busy {
    int64_t first_ns = 0;
    int64_t last_ns = 0;
    int64_t total_ns = 0;
  };
  // Data from one member of the process set.
  struct Peer {
    bool heard = false;
    int64_t first_us = 0;
    int64_t last_us = 0;
    int64_t bytes = 0;
  };
  // The operation stood still until data of `peer` came; -1: it did not.
  struct Wait {
    int peer = -1;
    int64_t since_us = 0;
    int64_t until_us = 0;
  };
  static constexpr int64_t kStillUs = 200;  // shorter pauses do not count as standing still

  int64_t started_us = 0;
  int64_t ended_us = 0;
  int64_t first_sent_us = 0;
  int64_t last_sent_us = 0;
  int64_t sent_bytes = 0;
  Busy pack;                // copying into what is sent
  Busy reduce;              // adding up or copying what has come
  std::vector<Peer> peers;  // by index in the set
  Wait longest;
  int64_t moved_us = 0;  // when it began, or data last came

  void Start(int64_t now_us) { started_us = moved_us = now_us; }
  Wait Heard(size_t peer, int64_t payload_bytes, int64_t now_us) {
    Peer& from = peers[peer];
    if (!from.heard) from.first_us = now_us;
    from.heard = true;
    from.last_us = now_us;
    from.bytes += payload_bytes;
    Wait wait;
    if (now_us - moved_us >= kStillUs) wait = {static_cast<int>(peer), moved_us, now_us};
    if (now_us - moved_us > longest.until_us - longest.since_us) longest = wait;
    moved_us = now_us;
    return wait;
  }
  void Sent(int64_t payload_bytes, int64_t now_us) {
    if (first_sent_us == 0) first_sent_us = now_us;
    last_sent_us = now_us;
    sent_bytes += payload_bytes;
  }
};

// Counts the time of a scope.
class TraceScope {
 public:
  TraceScope(TraceClock clock, OperationTrace::Busy* busy)
      : clock_(clock), busy_(busy), began_ns_(clock != nullptr ? clock() : 0) {}
  ~TraceScope() {
    if (clock_ == nullptr) return;
    if (busy_->first_ns == 0) busy_->first_ns = began_ns_;
    busy_->last_ns = clock_();
    busy_->total_ns += busy_->last_ns - began_ns_;
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  const TraceClock clock_;
  OperationTrace::Busy* const busy_;
  const int64_t began_ns_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_OPERATION_TRACE_H_
