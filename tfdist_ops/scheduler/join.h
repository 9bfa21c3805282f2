// Join: how a rank without data takes part in the others' collectives. Pure, but for the memory of
// the operations that are made here.
//
// A rank that has joined a process set calls nothing more of it until all its ranks have joined.
// Meanwhile it contributes the identity to reductions and no rows to what has rows, and drops what
// it gets. It can't know what the others call, so it is told:
//
//   announced   the leader's negotiator counts it as ready, and its answer says what to take part
//               in (Response::joined, infos)
//   predicted   starts without a word; so ranks that know of one that has joined tell the leader
//               what they start (kStarted), and the leader tells those that have joined (kTakePart)
//
// An average is over the ranks that asked for it. All ranks must divide by the same number, at the
// latest when the last contribution has come. So a rank that has joined contributes to a predicted
// operation only when all others have acknowledged (kJoinAck) that it has joined, and after which
// operations of its own (JoinNote::last): so whoever divides knows before the contribution comes.
#ifndef TFDIST_OPS_SCHEDULER_JOIN_H_
#define TFDIST_OPS_SCHEDULER_JOIN_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "scheduler/negotiator.h"
#include "scheduler/operation.h"
#include "scheduler/request_info.h"
#include "scheduler/wire.h"

namespace tfdist {

constexpr char kJoinKey[] = "join";

// The request of a rank that has joined, where another one asks for `info`.
RequestInfo JoinedInfo(const RequestInfo& info, int set_size);

// Whether the others may call this while ranks have joined. If not, an error for all ranks: process
// sets can't change then, and a root that has joined has nothing to give. `joined`: not empty.
Status CheckJoined(const RequestInfo& info, const std::vector<int32_t>& joined);

// The operation of a rank that has joined, with its own memory; `info` of JoinedInfo. Null: there
// is not enough memory.
std::unique_ptr<Request> MakeJoinedRequest(const RequestInfo& info);

// Ranks that have joined, as a member of the set knows them: the last predicted tickets of each.
using JoinedRanks = std::map<int32_t, std::vector<uint64_t>>;
// How many ranks of `size` call the predicted operation themselves.
int Contributors(const JoinedRanks& joined, int size, uint64_t ticket);

// The leader's record of the ranks of a process set that have joined.
class Joins {
 public:
  Joins(uint32_t set, std::vector<int32_t> ranks) : set_(set), ranks_(std::move(ranks)) {}

  // A rank has joined. An error: it already had (a bug of that rank).
  Status Add(const JoinNote& note, int64_t own_us);
  // Rank `by` knows that rank `rank` has joined. `round` tells which time: an answer may come so
  // late that the rank has joined again.
  void Acknowledge(int rank, int by, uint32_t round);
  uint32_t round() const { return round_; }
  // The ranks that all others now know to have joined, each once. Call it after TakeOrders: what is
  // announced to them from then on was called later than what they are ordered to take part in.
  std::vector<int32_t> TakeAcknowledged();
  // A rank has started a predicted operation. If it can't be next for a rank that has joined, it is
  // ignored: the rank that started it has not heard of that join yet, and will then report all its
  // operations again.
  void Started(const WaitNote& note, int64_t own_us);
  // A collective was announced, in which ranks that have joined take part.
  void Announced(const Response& response, int64_t own_us);
  // The orders (kTakePart) that can be sent now, each with its rank; in order.
  std::vector<std::pair<int32_t, WaitNote>> TakeOrders();
  // Forgets the ranks that have joined, when all have. Returns those that have called every
  // collective themselves.
  std::vector<int32_t> End();

  bool empty() const { return joined_.empty(); }
  bool complete() const { return joined_.size() == ranks_.size(); }
  bool Has(int rank) const { return joined_.count(rank) > 0; }
  // As of Negotiator; measured from the last collective in which they took part.
  std::vector<Stall> TakeStalls(int64_t own_us, int64_t warning_us);
  std::optional<Stall> Expired(int64_t own_us) const;

 private:
  struct Joined {
    std::vector<uint64_t> last;  // its last predicted tickets, with those it was told of
    std::set<int32_t> acknowledged_by;
    bool is_told = false;  // TakeAcknowledged has returned it
    std::deque<WaitNote> orders;
  };
  bool IsAcknowledged(const Joined& joined) const {
    return joined.acknowledged_by.size() + 1 >= ranks_.size();
  }
  Stall Describe(int64_t own_us) const;
  void NoteCollective(int64_t own_us);

  const uint32_t set_;
  const std::vector<int32_t> ranks_;
  std::map<int32_t, Joined> joined_;
  std::set<int32_t> latest_;  // those that have joined since the last collective
  bool took_part_ = false;    // a collective came after them
  uint32_t round_ = 0;        // how often all have joined
  double timeout_s_ = 0;
  int64_t moved_us_ = 0;
  int64_t reported_us_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_JOIN_H_
