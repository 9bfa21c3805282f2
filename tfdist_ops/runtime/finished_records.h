// FinishedRecords: what the last operations of this rank were and when, for observation. A ring
// buffer, so that adding a record takes no more memory. Not thread-safe.
#ifndef TFDIST_OPS_RUNTIME_FINISHED_RECORDS_H_
#define TFDIST_OPS_RUNTIME_FINISHED_RECORDS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/operation.h"

namespace tfdist {

struct FinishedRecord {
  std::string name;
  CollectiveKind kind = CollectiveKind::kBarrier;
  int64_t bytes = 0;
  int64_t submitted_us = 0;
  int64_t agreed_us = 0;
  int64_t done_us = 0;
  Code code = Code::kOk;
};

class FinishedRecords {
 public:
  explicit FinishedRecords(size_t capacity) : ring_(capacity) {}

  // Forgets the oldest one where there is no room.
  void Add(const Request& request, Code code, int64_t done_us) {
    FinishedRecord& record = ring_[(first_ + count_) % ring_.size()];
    if (count_ < ring_.size()) {
      ++count_;
    } else {
      first_ = (first_ + 1) % ring_.size();
    }
    record.name = request.info.key;
    record.kind = request.info.kind;
    record.bytes = request.bytes;
    record.submitted_us = request.submitted_us;
    record.agreed_us = request.agreed_us;
    record.done_us = done_us;
    record.code = code;
  }

  // At most `most` of them, the oldest first; they are forgotten here.
  std::vector<FinishedRecord> Take(size_t most) {
    std::vector<FinishedRecord> out;
    for (size_t left = std::min(most, count_); left > 0; --left) {
      out.push_back(ring_[first_]);
      first_ = (first_ + 1) % ring_.size();
      --count_;
    }
    return out;
  }

 private:
  std::vector<FinishedRecord> ring_;
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_FINISHED_RECORDS_H_
