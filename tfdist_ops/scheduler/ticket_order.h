// Order: how a collective is named on the wire, which one goes first, and which needs no agreement
// any more. Values without network or clock.
//
// A ticket names one collective of a process set. There are two kinds:
//
//   announced   a number that the set's leader has handed out, 1, 2, 3, ...
//   predicted   1 flag bit | 15 bits group | 16 bits bucket | 32 bits sequence
//
// A predicted ticket means, e.g., "the 7th time that bucket 2 of group 5 is reduced". Every rank
// counts its own submissions, so all ranks arrive at the same ticket without a message. It may be
// used as soon as the bucket has been agreed on once, through the leader, and as long as what the
// rank submits is what was agreed on then (BucketBook::Predictable). Which submission of a bucket
// is predicted is a function of the requests alone: all ranks see the same agreements for a key in
// the same order, so ranks that submit the same things decide alike; one that submits something
// else asks the leader (a deviation), and those who wait for it find out (stall_tracker.h).
//
// An allreduce outside of any group that all ranks call again and again under one key
// (RequestInfo::repeats) is predicted too, if few such keys take turns: the leader numbers the key
// with one of its answers (Negotiator::NumberFor), and what comes under it afterwards is counted
// from there. If many keys take turns, those that come together are better fused.
//
// Which collective goes first must be one total order on all ranks: at most max_active run side by
// side (inside a host fewer, by their bytes, but always one), and if two ranks filled their windows
// with different ones, each could wait for what the other holds back. TurnOf orders announced
// tickets by number, before all predicted ones, and those by (sequence, group, bucket). Take the
// collective that is first in this order among those that every rank of its set has submitted and
// that are not complete: what stands before it is either complete, or predicted and not yet
// submitted by some rank. So it is inside the window of each of its ranks, unless the places before
// it are taken by the latter. Those can't move for want of that rank's data; and an operation that
// has not moved for a while takes no place in the window (OperationRunner::Advance). So the first
// one runs, and after it the next.
#ifndef TFDIST_OPS_SCHEDULER_TICKET_ORDER_H_
#define TFDIST_OPS_SCHEDULER_TICKET_ORDER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler/request_info.h"

namespace tfdist {

constexpr uint32_t kMaxGroupNumber = (uint32_t{1} << 15) - 2;
// The group number of repeated allreduces that belong to no group; and how many of their keys can
// have a number (from 1), which takes the place of the bucket.
constexpr uint32_t kRepeatedGroup = kMaxGroupNumber + 1;
constexpr uint32_t kMaxRepeated = 4096;

// The ticket of the `sequence`-th (1, 2, ...) submission of a bucket; 0 when a number does not fit,
// or the group has none (0).
uint64_t PredictedTicket(uint32_t group, int64_t bucket, uint64_t sequence);
bool IsPredicted(uint64_t ticket);
uint32_t TicketGroup(uint64_t ticket);     // of a predicted one
uint32_t TicketBucket(uint64_t ticket);    // likewise
uint32_t TicketSequence(uint64_t ticket);  // likewise
// "submission 7 of bucket 2 of group 5", "submission 7 of repeated allreduce 3", or "number 12"
std::string TicketText(uint64_t ticket);

// The place of a ticket in the order of all of its set; one to one.
using Turn = std::pair<uint64_t, uint64_t>;
Turn TurnOf(uint64_t ticket);
// The bucket of a predicted ticket, whatever its sequence.
uint64_t BucketKey(uint64_t ticket);

// One rank's record of the buckets of one process set.
class BucketBook {
 public:
  // Counts a submission. Returns its predicted ticket, 0 when it can't have one.
  uint64_t Count(uint32_t group, int64_t bucket);
  // The same for an allreduce outside of any group; 0 until its key has a number.
  uint64_t CountRepeated(const std::string& key);
  // Gives the key this number. Returns the ticket of the submission that was agreed on just now.
  uint64_t NumberKey(const std::string& key, uint32_t number);
  // Whether a submission needs no agreement.
  bool Predictable(uint64_t ticket, const RequestInfo& info) const;
  // Whether the bucket has been agreed on before, and has elements (see Agree).
  bool Known(uint64_t ticket) const;
  // The ranks have agreed on this submission, or have found that they do not agree. One without
  // elements needs agreement again each time: it would end before other ranks have submitted it,
  // and this rank could be several submissions ahead of one that joins.
  void Agree(uint64_t ticket, const RequestInfo& info);
  void Forget(uint64_t ticket);
  // How often Agree or Forget has been called for its bucket.
  uint64_t Agreements(uint64_t ticket) const;
  // Of all buckets of the group that have been agreed on: what a step reduces. 0: not known.
  int64_t GroupBytes(uint64_t ticket) const;
  // Whether this rank has submitted it.
  bool Submitted(uint64_t ticket) const;
  // The last ticket of every bucket: what a rank that leaves has taken part in.
  std::vector<uint64_t> LastTickets() const;

 private:
  uint64_t CountAny(uint32_t group, int64_t bucket);
  struct Bucket {
    uint64_t submitted = 0;
    uint64_t agreements = 0;
    std::optional<RequestInfo> agreed;  // what was agreed on last
  };
  std::map<std::pair<uint32_t, int64_t>, Bucket> buckets_;
  std::unordered_map<std::string, uint32_t> numbers_;  // by key, in kRepeatedGroup
};

// Whether a rank whose last tickets were `last` has taken part, or will, in `ticket`.
bool TookPart(const std::vector<uint64_t>& last, uint64_t ticket);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_TICKET_ORDER_H_
