// PendingRequests: every request of this rank that has not ended: those in the process sets, and
// those that were on their way when the work stopped, which wait here for the outcome.
#ifndef TFDIST_OPS_SCHEDULER_PENDING_REQUESTS_H_
#define TFDIST_OPS_SCHEDULER_PENDING_REQUESTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/process_set_registry.h"

namespace tfdist {

class PendingRequests {
 public:
  using Visit = std::function<void(const ProcessSet&, const Request&)>;

  explicit PendingRequests(const ProcessSetRegistry& sets) : sets_(sets) {}

  // Those in the process sets.
  void ForEachInSets(const Visit& visit) const;
  const Request* Find(uint64_t id) const;  // null: it has ended
  // The name of the request that was submitted first; "": there is none.
  std::string OldestKey() const;

  void Stop(std::unique_ptr<Request> request) { stopped_.push_back(std::move(request)); }
  // Takes all requests out of a set, but for those that its gate holds: the verdict says whether
  // they count.
  void StopAllOf(ProcessSet* set);
  bool has_stopped() const { return !stopped_.empty(); }
  std::vector<std::unique_ptr<Request>> TakeStopped() { return std::exchange(stopped_, {}); }

 private:
  const ProcessSetRegistry& sets_;
  std::vector<std::unique_ptr<Request>> stopped_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_PENDING_REQUESTS_H_
