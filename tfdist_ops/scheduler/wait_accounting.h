// WaitAccounting: how long this rank has waited for which other rank. Pure.
//
// An interval of waiting begins when this rank is ready for an operation and ends when the leader
// announces it, for the rank that was ready last; or it lies between two moments at which data of a
// running operation came, and ends for the rank from which it came. Operations overlap, so each
// moment counts once, for the rank whose interval ended first.
//
// That rank may itself have waited (in a ring, for its own left neighbor). The one for which all
// wait in the end waits least: in an operation that needs all ranks, rank i stands still for
// T - t_i (t_i: when it was ready; T = max t_i), plus the transfer, which is equal for all. So
// the rank with the smallest sum over operations is the one with the largest sum of t_i, whatever
// the algorithm.
#ifndef TFDIST_OPS_SCHEDULER_WAIT_ACCOUNTING_H_
#define TFDIST_OPS_SCHEDULER_WAIT_ACCOUNTING_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

namespace tfdist {

class WaitAccounting {
 public:
  // Returns how much of the interval counts, which is its last part.
  int64_t Add(int rank, int64_t since_us, int64_t until_us) {
    since_us = std::max(since_us, counted_until_us_);
    if (until_us <= since_us) return 0;
    total_us_ += until_us - since_us;
    by_rank_us_[rank] += until_us - since_us;
    counted_until_us_ = until_us;
    return until_us - since_us;
  }
  int64_t total_us() const { return total_us_; }
  const std::map<int, int64_t>& by_rank_us() const { return by_rank_us_; }
  // "\"waited_us\": 12, \"waited_for_us\": {\"1\": 12}"
  std::string Json() const {
    std::string ranks;
    for (const auto& [rank, us] : by_rank_us_) {
      ranks += (ranks.empty() ? "\"" : ", \"") + std::to_string(rank) + "\": " + std::to_string(us);
    }
    return "\"waited_us\": " + std::to_string(total_us_) + ", \"waited_for_us\": {" + ranks + "}";
  }

 private:
  int64_t counted_until_us_ = 0;
  int64_t total_us_ = 0;
  std::map<int, int64_t> by_rank_us_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_WAIT_ACCOUNTING_H_
