// BlockedTime: how long the program of this rank could only wait for its operations. Not
// thread-safe.
//
// The rest of the time it computes, reads data or runs callbacks. In training, in which all ranks
// take the same time for a step, this rest tells a slow rank from the ranks that wait for it.
//
// Buckets of gradients run while the backward pass goes on, so only the last part of a step counts:
// from the submission of its last bucket to the end of the last one. Any other operation is taken
// to block from its submission on, or from the last submission that is known when it ends. Each
// moment counts once.
#ifndef TFDIST_OPS_RUNTIME_BLOCKED_TIME_H_
#define TFDIST_OPS_RUNTIME_BLOCKED_TIME_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/operation.h"

namespace tfdist {

class BlockedTime {
 public:
  // An operation of this rank has ended.
  void Add(const Request& request, int64_t done_us) {
    last_submitted_us_ = std::max(last_submitted_us_, request.submitted_us);
    if (!IsBucket(request) || request.bucket_count <= 1) {
      Count(last_submitted_us_, done_us);
      return;
    }
    Step& step = steps_[{request.info.set, request.group}];
    const size_t bucket = static_cast<size_t>(request.bucket_index);
    const size_t buckets = static_cast<size_t>(request.bucket_count);
    // A bucket that comes again belongs to the next step: the one before was not complete.
    if (step.seen.size() != buckets || step.seen[bucket]) step = Step{std::vector<bool>(buckets)};
    step.seen[bucket] = true;
    step.last_submitted_us = std::max(step.last_submitted_us, request.submitted_us);
    if (++step.count < buckets) return;
    Count(step.last_submitted_us, done_us);
    step = Step{std::vector<bool>(buckets)};
  }
  int64_t total_us() const { return total_us_; }

 private:
  struct Step {
    std::vector<bool> seen;  // by bucket
    size_t count = 0;
    int64_t last_submitted_us = 0;
  };

  void Count(int64_t since_us, int64_t until_us) {
    since_us = std::max(since_us, counted_until_us_);
    if (until_us <= since_us) return;
    total_us_ += until_us - since_us;
    counted_until_us_ = until_us;
  }

  std::map<std::pair<uint32_t, std::string>, Step> steps_;  // by set and group
  int64_t last_submitted_us_ = 0;
  int64_t counted_until_us_ = 0;
  int64_t total_us_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_BLOCKED_TIME_H_
