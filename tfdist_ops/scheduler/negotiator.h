// Negotiator: a process set leader's table of which ranks are ready for what. Pure: no network, no
// clock of its own. Ranks are global numbers.
//
// A key is announced when every rank is ready for it and all agree; announcements carry tickets,
// whose order is the order of collectives on every rank. Requests that do not agree are announced
// to all as an error. Here it is also known which ranks a key still waits for, for stall reports
// and deadlines.
#ifndef TFDIST_OPS_SCHEDULER_NEGOTIATOR_H_
#define TFDIST_OPS_SCHEDULER_NEGOTIATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "scheduler/request_info.h"

namespace tfdist {

class SetTable;

// Something that has waited longer than it may.
struct Stall {
  std::string key;
  CollectiveKind kind = CollectiveKind::kBarrier;
  int64_t age_us = 0;
  std::vector<int> missing;
  std::string text;  // 'allreduce "x" has waited 31.0 s for ranks 2,3'
};
Stall MakeStall(const RequestInfo& info, int64_t age_us, std::vector<int> missing);

// The algorithm by which an allreduce runs when it is fused with nothing; null: it has none.
using AlgorithmOf = std::function<const AlgorithmEntry*(const RequestInfo& info)>;

// Whether these can run as one collective: allreduces of the same dtype, reduction, factors and
// requested algorithm, whose results have the same bits whether fused or not.
bool Fuses(const RequestInfo& a, const RequestInfo& b, const AlgorithmOf& algorithm_of);
// Which of the agreed requests (in order) run as one collective: consecutive ones that fuse,
// together at most `fusion_bytes`; buckets are left as they are. Returns how many there are in each
// batch.
std::vector<int> FuseRequests(const std::vector<RequestInfo>& ready, int64_t fusion_bytes,
                              const AlgorithmOf& algorithm_of);

class Negotiator {
 public:
  // For the ranks 0 ... size - 1, where every allreduce runs by the "pairwise" algorithm.
  Negotiator(int size, int64_t fusion_bytes);
  // `ranks`: ascending. `sets`: of the world's negotiator alone.
  Negotiator(std::vector<int32_t> ranks, int64_t fusion_bytes, AlgorithmOf algorithm_of,
             std::unique_ptr<SetTable> sets = nullptr);
  ~Negotiator();

  // Rank `rank` is ready. An error: it already was (a bug on that rank).
  Status Add(int rank, RequestInfo info, int64_t own_us);

  // Rank `rank` is ready for whatever all others are ready for (join.h), until EndJoin.
  void Join(int rank);
  void EndJoin() { joined_.clear(); }

  // Responses that can be announced now, in ticket order.
  std::vector<Response> TakeResponses();

  // Keys older than `warning_us` that were not reported within the last `warning_us`.
  std::vector<Stall> TakeStalls(int64_t own_us, int64_t warning_us);
  // The first key whose own timeout has passed.
  std::optional<Stall> Expired(int64_t own_us) const;

  bool empty() const { return pending_.empty(); }
  // By key that is not agreed on yet: the ranks that it waits for.
  std::map<std::string, std::vector<int32_t>> Missing() const;
  // Whether some key waits for `rank`.
  bool WaitsFor(int rank) const;
  // The request that `rank` has announced under a key that is not agreed on yet; null: none.
  const RequestInfo* Announced(int rank, const std::string& key) const;
  // The group that `rank` waits to register; null: none.
  const RequestInfo* Registration(int rank) const;
  // Of an agreed group, by its number; empty: there is none.
  const std::string& GroupDescription(uint32_t number) const;

 private:
  struct Pending {
    std::vector<std::optional<RequestInfo>> by_rank;
    int64_t since_us = 0;
    int64_t reported_us = 0;
  };
  // A request that all ranks are ready for.
  struct Ready {
    std::vector<RequestInfo> by_rank;
    std::vector<int32_t> joined;  // those that have joined, and did not ask for it
    int32_t last = -1;            // the rank that completed it
  };
  Stall Describe(const Pending& pending, int64_t own_us) const;
  bool Waits(const Pending& pending, size_t index) const;  // for the rank of this index
  bool IsComplete(const Pending& pending) const;
  void MoveToReady(const std::string& key, int last);
  Response Answer(const std::vector<RequestInfo>& by_rank);
  uint32_t NumberFor(const std::vector<RequestInfo>& by_rank);  // of Response::numbers
  // Refuses the gradient lists of one name once every rank waits for one, but not all for the same:
  // none of them can ever be complete.
  void RefuseCrossedRegistrations();
  void RefuseRegistrations(std::map<int32_t, RequestInfo> by_rank,
                           const std::vector<std::string>& keys);

  std::vector<int32_t> Members() const;  // for CheckRequestsMatch: empty when they are 0, 1, 2, ...
  size_t Index(int rank) const;          // ranks_.size(): not one of them

  const std::vector<int32_t> ranks_;
  const int64_t fusion_bytes_;
  const AlgorithmOf algorithm_of_;
  const std::unique_ptr<SetTable> sets_;
  std::map<uint32_t, std::string> groups_;  // number → description
  struct Repeated {
    uint64_t since = 0;  // repetitions_ when counting began
    int times = -1;      // agreements since then; -1: the first is yet to come
    bool has_number = false;
  };
  std::unordered_map<std::string, Repeated> repeated_;  // by key
  uint64_t repetitions_ = 0;                            // agreements on all of them
  uint32_t numbers_ = 0;                                // how many of them have one
  uint64_t next_ticket_ = 1;
  std::map<std::string, Pending> pending_;
  std::vector<Ready> ready_;  // by key in order of completion
  std::set<int32_t> joined_;
  std::vector<Response> refused_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_NEGOTIATOR_H_
