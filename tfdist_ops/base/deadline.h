// Times and deadlines in the core are int64 microseconds of the monotonic clock; only short
// durations are measured in nanoseconds (NowNs).
// Pure logic takes `now_us` as an argument, so that a simulation can own the clock.
#ifndef TFDIST_OPS_BASE_DEADLINE_H_
#define TFDIST_OPS_BASE_DEADLINE_H_

#include <chrono>
#include <cstdint>
#include <limits>

namespace tfdist {

constexpr int64_t kNoDeadline = std::numeric_limits<int64_t>::max();

inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_DEADLINE_H_
