// Negotiator: the leader's table of who is ready for what. Pure: no network, no clock of its own.
//
// A key is announced when every rank is ready for it and all agree; announcements carry tickets,
// whose order is the order of collectives on every rank. What does not agree is announced as an
// error to all. Which ranks a key still misses is known here, for stall reports and deadlines.
#ifndef TFDIST_OPS_SCHEDULER_NEGOTIATOR_H_
#define TFDIST_OPS_SCHEDULER_NEGOTIATOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "scheduler/message.h"

namespace tfdist {

// Which of the agreed requests (in order) run as one collective: consecutive allreduces of the same
// type, operation and factors, together at most `fusion_bytes`; buckets are left as they are.
// Returns how many there are in each batch.
std::vector<int> FuseRequests(const std::vector<RequestInfo>& ready, int64_t fusion_bytes);

class Negotiator {
 public:
  Negotiator(int size, int64_t fusion_bytes) : size_(size), fusion_bytes_(fusion_bytes) {}

  // Rank `rank` is ready. An error: it already was (a bug on that rank).
  Status Add(int rank, RequestInfo info, int64_t now_us);

  // What can be announced now, in ticket order.
  std::vector<Response> TakeResponses();

  // A key that has waited longer than it may.
  struct Stall {
    std::string key;
    CollectiveKind kind;
    int64_t age_us;
    std::vector<int> missing;
    std::string text;  // 'allreduce "x" has waited 31.0 s for ranks 2,3'
  };
  // Keys older than `warning_us` that were not reported within the last `warning_us`.
  std::vector<Stall> TakeStalls(int64_t now_us, int64_t warning_us);
  // The first key whose own timeout has passed.
  std::optional<Stall> Expired(int64_t now_us) const;

  bool empty() const { return pending_.empty(); }
  // Whether some key waits for `rank`.
  bool WaitsFor(int rank) const;

 private:
  struct Pending {
    std::vector<std::optional<RequestInfo>> by_rank;
    int count = 0;
    int64_t since_us = 0;
    int64_t reported_us = 0;
  };
  Stall Describe(const std::string& key, const Pending& pending, int64_t now_us) const;
  // Every rank waits for a group, and no two mean the same: they never will.
  void RefuseCrossedRegistrations();

  const int size_;
  const int64_t fusion_bytes_;
  uint64_t next_ticket_ = 1;
  std::map<std::string, Pending> pending_;
  std::vector<std::vector<RequestInfo>> ready_;  // by key in order of completion, then by rank
  std::vector<Response> refused_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_NEGOTIATOR_H_
