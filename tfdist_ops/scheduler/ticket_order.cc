#include "scheduler/ticket_order.h"

#include <algorithm>
#include <limits>

namespace tfdist {
namespace {

constexpr uint64_t kPredicted = uint64_t{1} << 63;
constexpr int kGroupShift = 48;
constexpr int kBucketShift = 32;
constexpr int64_t kMaxBucket = (int64_t{1} << 16) - 1;

std::pair<uint32_t, int64_t> BucketOf(uint64_t ticket) {
  return {TicketGroup(ticket), TicketBucket(ticket)};
}

}  // namespace

uint64_t PredictedTicket(uint32_t group, int64_t bucket, uint64_t sequence) {
  if (group == 0 || group > kRepeatedGroup || bucket < 0 || bucket > kMaxBucket ||
      sequence > std::numeric_limits<uint32_t>::max()) {
    return 0;
  }
  return kPredicted | (uint64_t{group} << kGroupShift) |
         (static_cast<uint64_t>(bucket) << kBucketShift) | sequence;
}

bool IsPredicted(uint64_t ticket) { return (ticket & kPredicted) != 0; }

uint32_t TicketGroup(uint64_t ticket) {
  return static_cast<uint32_t>(ticket >> kGroupShift) & ((uint32_t{1} << 15) - 1);
}

uint32_t TicketBucket(uint64_t ticket) {
  return static_cast<uint32_t>(ticket >> kBucketShift) & static_cast<uint32_t>(kMaxBucket);
}

uint32_t TicketSequence(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

std::string TicketText(uint64_t ticket) {
  if (!IsPredicted(ticket)) return "number " + std::to_string(ticket);
  const std::string which = "submission " + std::to_string(TicketSequence(ticket)) + " of ";
  if (TicketGroup(ticket) == kRepeatedGroup) {
    return which + "repeated allreduce " + std::to_string(TicketBucket(ticket));
  }
  return which + "bucket " + std::to_string(TicketBucket(ticket)) + " of group " +
         std::to_string(TicketGroup(ticket));
}

Turn TurnOf(uint64_t ticket) {
  if (!IsPredicted(ticket)) return {ticket, 0};
  return {kPredicted | TicketSequence(ticket), (ticket & ~kPredicted) >> kBucketShift};
}

uint64_t BucketKey(uint64_t ticket) { return ticket >> kBucketShift; }

uint64_t BucketBook::Count(uint32_t group, int64_t bucket) {
  return group <= kMaxGroupNumber ? CountAny(group, bucket) : 0;
}

uint64_t BucketBook::CountAny(uint32_t group, int64_t bucket) {
  if (PredictedTicket(group, bucket, 0) == 0) return 0;
  return PredictedTicket(group, bucket, ++buckets_[{group, bucket}].submitted);
}

uint64_t BucketBook::CountRepeated(const std::string& key) {
  const auto it = numbers_.find(key);
  return it != numbers_.end() ? CountAny(kRepeatedGroup, it->second) : 0;
}

uint64_t BucketBook::NumberKey(const std::string& key, uint32_t number) {
  numbers_[key] = number;
  return PredictedTicket(kRepeatedGroup, number, 0);
}

bool BucketBook::Known(uint64_t ticket) const {
  const auto it = buckets_.find(BucketOf(ticket));
  return ticket != 0 && it != buckets_.end() && it->second.agreed.has_value();
}

bool BucketBook::Predictable(uint64_t ticket, const RequestInfo& info) const {
  if (ticket == 0) return false;
  const auto it = buckets_.find(BucketOf(ticket));
  return it != buckets_.end() && it->second.agreed.has_value() &&
         SameRequest(*it->second.agreed, info);
}

void BucketBook::Agree(uint64_t ticket, const RequestInfo& info) {
  if (ticket == 0) return;
  Bucket& bucket = buckets_[BucketOf(ticket)];
  bucket.agreed.reset();
  if (ShapeBytes(info) > 0) bucket.agreed = info;
  ++bucket.agreements;
}

void BucketBook::Forget(uint64_t ticket) {
  if (ticket == 0) return;
  Bucket& bucket = buckets_[BucketOf(ticket)];
  bucket.agreed.reset();
  ++bucket.agreements;
}

uint64_t BucketBook::Agreements(uint64_t ticket) const {
  const auto it = buckets_.find(BucketOf(ticket));
  return it != buckets_.end() ? it->second.agreements : 0;
}

int64_t BucketBook::GroupBytes(uint64_t ticket) const {
  const uint32_t group = TicketGroup(ticket);
  int64_t bytes = 0;
  if (group == kRepeatedGroup) return bytes;
  for (auto it = buckets_.lower_bound({group, 0}); it != buckets_.end(); ++it) {
    if (it->first.first != group) break;
    if (it->second.agreed.has_value()) bytes += ShapeBytes(*it->second.agreed);
  }
  return bytes;
}

bool BucketBook::Submitted(uint64_t ticket) const {
  const auto it = buckets_.find(BucketOf(ticket));
  return it != buckets_.end() && it->second.submitted >= TicketSequence(ticket);
}

std::vector<uint64_t> BucketBook::LastTickets() const {
  std::vector<uint64_t> last;
  for (const auto& [place, bucket] : buckets_) {
    last.push_back(PredictedTicket(place.first, place.second, bucket.submitted));
  }
  return last;
}

bool TookPart(const std::vector<uint64_t>& last, uint64_t ticket) {
  return std::any_of(last.begin(), last.end(), [ticket](uint64_t own) {
    return BucketOf(own) == BucketOf(ticket) && TicketSequence(own) >= TicketSequence(ticket);
  });
}

}  // namespace tfdist
