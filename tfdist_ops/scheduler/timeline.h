// Timeline: what happened on this rank, on its way from the engine to a file.
//
// One producer (the engine's thread) and one consumer (runtime/timeline_writer.h) share a ring of
// records that is allocated once: no lock, no allocation, no system call on the engine's side. A
// ring that is full drops what comes, and counts it. Spans come from the user's threads, which may
// wait: they have a queue of their own.
#ifndef TFDIST_OPS_SCHEDULER_TIMELINE_H_
#define TFDIST_OPS_SCHEDULER_TIMELINE_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "scheduler/operation_trace.h"

namespace tfdist {

// Times: monotonic microseconds; 0 = never got there.
struct TimelineRecord {
  static constexpr int kMostPeers = 16;  // of a larger set those that came last
  struct Peer {
    int32_t rank;
    int64_t first_us, last_us, bytes;
  };
  enum class Type : uint8_t { kOperation, kWait, kClock };
  Type type = Type::kOperation;
  // kOperation
  char name[128] = {};
  const char* kind = "";
  uint32_t set = 0;
  uint64_t ticket = 0;  // of what ran: the same for requests that ran as one; 0: nothing ran
  int32_t code = 0;
  int32_t last_ready = -1;  // the rank that was ready last; -1: no agreement was needed
  int64_t bytes = 0;
  int64_t submitted_us = 0, agreed_us = 0, started_us = 0, ended_us = 0, done_us = 0;
  int64_t first_sent_us = 0, last_sent_us = 0, sent_bytes = 0;
  OperationTrace::Busy pack, reduce;
  // The rank for which it stood still longest; -1: it did not. kWait: the rank, and the part of the
  // wait that counts (wait_accounting.h).
  int32_t waited_for = -1;
  int64_t waited_since_us = 0, waited_until_us = 0;
  int peer_count = 0;
  Peer peers[kMostPeers] = {};
  // kClock: a round trip to rank 0 and back, each time by the clock of the rank that took it
  int64_t asked_us = 0, heard_us = 0, answered_us = 0, back_us = 0;
};

// Fills in what is known of the peers; ranks: of the set, by index.
void TracePeers(const OperationTrace& trace, const std::vector<int32_t>& ranks,
                TimelineRecord* record);
// A line of the file: JSON, with its end of line.
std::string TimelineLine(const TimelineRecord& record);

struct TimelineSpan {
  std::string name;
  int64_t begin_us = 0;
  int64_t end_us = 0;
};
std::string TimelineLine(const TimelineSpan& span);

class Timeline {
 public:
  static constexpr size_t kRecords = 4096;
  static constexpr size_t kMostSpans = 4096;  // not yet taken
  explicit Timeline(TraceClock clock, size_t records = kRecords);

  TraceClock clock() const { return clock_; }
  int64_t NowUs() const { return clock_() / 1000; }

  // Producer: room for one record, with the defaults; null: the ring is full, the record is lost.
  // Commit publishes it.
  TimelineRecord* Begin();
  void Commit();
  // Any thread.
  void AddSpan(TimelineSpan span);

  // Consumer: appends the lines of what has come; returns how many.
  size_t TakeLines(std::string* out);
  // Counts records that were lost on their way.
  void Drop(int64_t count) {
    dropped_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
  }
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  const TraceClock clock_;
  std::vector<TimelineRecord> ring_;
  std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> read_{0};
  std::atomic<uint64_t> dropped_{0};
  std::mutex mutex_;  // guards spans_
  std::vector<TimelineSpan> spans_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_TIMELINE_H_
