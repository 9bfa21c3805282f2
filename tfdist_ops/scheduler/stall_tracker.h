// StallTracker: what the leader of a process set knows of predicted operations that do not come to
// an end. Pure: no network, no clock of its own.
//
// A predicted operation starts without a word, so nobody knows who is missing when it stalls. A
// rank whose operation has waited for a while says so; the leader asks the others, and keeps what
// they answer until nobody is missing. From that it names the missing ranks, as the Negotiator
// does for announced ones, and finds out when a missing rank will not come because it does
// something else: it announced other things under the key, or registers another group.
#ifndef TFDIST_OPS_SCHEDULER_STALL_TRACKER_H_
#define TFDIST_OPS_SCHEDULER_STALL_TRACKER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/status.h"
#include "scheduler/negotiator.h"
#include "scheduler/request_info.h"
#include "scheduler/ticket_order.h"

namespace tfdist {

class StallTracker {
 public:
  // How far a rank is with a ticket.
  enum class Answer : uint8_t { kNotSubmitted = 0, kRunning = 1, kDone = 2 };

  explicit StallTracker(std::vector<int32_t> ranks) : ranks_(std::move(ranks)) {}

  // Rank `rank` has waited for `ticket` since `since_us`. True: it is the first to report it, and
  // the other ranks have to be asked.
  bool Add(int rank, uint64_t ticket, RequestInfo info, int64_t since_us);
  void OnAnswer(int rank, uint64_t ticket, Answer answer);

  // An error that says why a missing rank can't come, if it does something else. A registration
  // counts once it has lasted beside the wait for a twentieth of the timeout (1 to 15 s): the rank
  // may train two models in two threads.
  Status FindMismatch(const Negotiator& negotiator, int64_t own_us);
  // As of Negotiator.
  std::vector<Stall> TakeStalls(int64_t own_us, int64_t warning_us);
  std::optional<Stall> Expired(int64_t own_us) const;
  bool empty() const { return waits_.empty(); }

 private:
  struct Place {  // of one rank
    std::optional<Answer> answer;
    std::optional<RequestInfo> info;  // when it waits
    int64_t registers_since_us = -1;
  };
  struct Wait {
    std::map<int32_t, Place> by_rank;
    int64_t since_us = 0;
    int64_t reported_us = 0;
    double timeout_s = 0;
  };
  Status MismatchOf(uint64_t ticket, Wait* wait, const Negotiator& negotiator, int64_t own_us);
  static std::vector<int> Missing(const Wait& wait);  // includes those that have not answered
  static Stall Describe(const Wait& wait, const std::vector<int>& missing, int64_t own_us);

  const std::vector<int32_t> ranks_;
  std::map<Turn, std::pair<uint64_t, Wait>> waits_;  // in the order of tickets
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_STALL_TRACKER_H_
