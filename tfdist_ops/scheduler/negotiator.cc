#include "scheduler/negotiator.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#include "scheduler/join.h"
#include "scheduler/process_set.h"
#include "scheduler/request_match.h"
#include "scheduler/row_counts.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

std::vector<int32_t> WorldRanks(int size) {
  std::vector<int32_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Keys that repeat are predicted when at most kMostInTurn take turns: more of them come together,
// and are better fused (docs/design/0003). Within kTimes agreements on one key, each other key may
// have one turn more or less, in any order; kMostRepetitions still tells four keys from five.
constexpr int kMostInTurn = 4;
constexpr int kTimes = 8;
constexpr uint64_t kMostRepetitions = kTimes * kMostInTurn + kMostInTurn - 1;
static_assert(kMostRepetitions < kTimes * (kMostInTurn + 1) - kMostInTurn);
// The most keys whose repetitions are counted.
constexpr size_t kMostRepeated = 4 * kMaxRepeated;

// Whether some rank has counted it under the number of a key that repeats.
bool IsCounted(const std::vector<RequestInfo>& by_rank) {
  return std::any_of(by_rank.begin(), by_rank.end(), [](const RequestInfo& info) {
    return info.predicted != 0 && TicketGroup(info.predicted) == kRepeatedGroup;
  });
}

// The name that the user gave a list of gradients, among the options in its last line; "": none.
std::string ListName(const std::string& description) {
  constexpr char kName[] = " name=";
  const size_t options = description.rfind('\n') + 1;
  const size_t found = description.find(kName, options);
  if (found == std::string::npos) return "";
  const size_t begin = found + sizeof(kName) - 1;
  return description.substr(begin, description.find(' ', begin) - begin);
}

// Adds one more collective to `response`.
void AddKey(const std::vector<RequestInfo>& by_rank, const std::vector<int32_t>& joined,
            uint32_t number, Response* response) {
  response->keys.push_back(by_rank[0].key);
  if (number != 0) {
    response->numbers.resize(response->keys.size());
    response->numbers.back() = number;
  }
  response->joined = joined;
  if (joined.empty()) return;
  response->infos.push_back(JoinedInfo(by_rank[0], static_cast<int>(by_rank.size())));
}

}  // namespace

Stall MakeStall(const RequestInfo& info, int64_t age_us, std::vector<int> missing) {
  Stall stall{info.key, info.kind, age_us, std::move(missing), ""};
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f", static_cast<double>(age_us) * 1e-6);
  stall.text = std::string(CollectiveKindName(info.kind)) + " \"" + info.key + "\"" +
               (info.set == kWorldSet ? "" : " of process set " + std::to_string(info.set)) +
               " has waited " + seconds + " s for " + RankList(stall.missing);
  return stall;
}

bool Fuses(const RequestInfo& a, const RequestInfo& b, const AlgorithmOf& algorithm_of) {
  const bool alike = a.kind == CollectiveKind::kAllreduce && b.kind == CollectiveKind::kAllreduce &&
                     !a.bucket && !b.bucket && a.dtype == b.dtype && a.op == b.op &&
                     a.prescale == b.prescale && a.postscale == b.postscale &&
                     a.algorithm == b.algorithm;
  if (!alike) return false;
  const AlgorithmEntry* one = algorithm_of(a);
  const AlgorithmEntry* other = algorithm_of(b);
  return one != nullptr && other != nullptr && SameBits(*one, *other);
}

std::vector<int> FuseRequests(const std::vector<RequestInfo>& ready, int64_t fusion_bytes,
                              const AlgorithmOf& algorithm_of) {
  std::vector<int> batches;
  int64_t bytes = 0;
  for (size_t i = 0; i < ready.size(); ++i) {
    const RequestInfo& info = ready[i];
    const int64_t own = ShapeBytes(info);
    const bool fits =
        i > 0 && bytes + own <= fusion_bytes && Fuses(ready[i - 1], info, algorithm_of);
    if (fits) {
      ++batches.back();
      bytes += own;
    } else {
      batches.push_back(1);
      bytes = own;
    }
  }
  return batches;
}

Negotiator::Negotiator(std::vector<int32_t> ranks, int64_t fusion_bytes, AlgorithmOf algorithm_of,
                       std::unique_ptr<SetTable> sets)
    : ranks_(std::move(ranks)),
      fusion_bytes_(fusion_bytes),
      algorithm_of_(std::move(algorithm_of)),
      sets_(std::move(sets)) {}

Negotiator::Negotiator(int size, int64_t fusion_bytes)
    : Negotiator(WorldRanks(size), fusion_bytes, [](const RequestInfo& info) {
        return FindAlgorithm(info.kind, "pairwise", ScheduleArgs(), info.dtype);
      }) {}

Negotiator::~Negotiator() = default;

size_t Negotiator::Index(int rank) const {
  return static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

std::vector<int32_t> Negotiator::Members() const {
  const bool is_world = ranks_.back() == static_cast<int32_t>(ranks_.size()) - 1;
  return is_world ? std::vector<int32_t>() : ranks_;
}

Status Negotiator::Add(int rank, RequestInfo info, int64_t own_us) {
  const size_t index = Index(rank);
  if (index == ranks_.size()) {
    return TFDIST_INTERNAL("rank " + std::to_string(rank) + " announced \"" + info.key +
                           "\" of process set " + std::to_string(info.set) +
                           ", which it is not in");
  }
  const std::string key = info.key;
  const bool is_register = info.kind == CollectiveKind::kRegister;
  Pending& pending = pending_[key];
  if (pending.by_rank.empty()) {
    pending.by_rank.resize(ranks_.size());
    pending.since_us = own_us;
    pending.reported_us = own_us;
  }
  std::optional<RequestInfo>& place = pending.by_rank[index];
  if (place.has_value()) {
    return TFDIST_INTERNAL("rank " + std::to_string(rank) + " announced \"" + key + "\" twice");
  }
  place = std::move(info);
  if (IsComplete(pending)) {
    MoveToReady(key, rank);
  } else if (is_register) {
    RefuseCrossedRegistrations();
  }
  return Status();
}

bool Negotiator::Waits(const Pending& pending, size_t index) const {
  return !pending.by_rank[index].has_value() && joined_.count(ranks_[index]) == 0;
}

bool Negotiator::IsComplete(const Pending& pending) const {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (Waits(pending, i)) return false;
  }
  return true;
}

void Negotiator::MoveToReady(const std::string& key, int last) {
  std::vector<std::optional<RequestInfo>> entries = std::move(pending_[key].by_rank);
  pending_.erase(key);
  const RequestInfo asked = **std::find_if(entries.begin(), entries.end(),
                                           [](const auto& entry) { return entry.has_value(); });
  Ready ready;
  ready.last = last;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].has_value()) {
      ready.joined.push_back(ranks_[i]);
      entries[i] = asked;  // agrees with the others
    }
    ready.by_rank.push_back(std::move(*entries[i]));
  }
  ready_.push_back(std::move(ready));
}

void Negotiator::Join(int rank) {
  joined_.insert(rank);
  std::vector<std::string> complete;
  for (const auto& [key, pending] : pending_) {
    if (IsComplete(pending)) complete.push_back(key);
  }
  for (const std::string& key : complete) MoveToReady(key, rank);
  RefuseCrossedRegistrations();
}

void Negotiator::RefuseCrossedRegistrations() {
  struct Crossed {
    std::map<int32_t, RequestInfo> first;  // by rank
    std::vector<std::string> keys;
  };
  // Threads of a rank may register lists of different names in any order.
  std::map<std::string, Crossed> by_name;
  for (const auto& [key, pending] : pending_) {
    Crossed* crossed = nullptr;
    for (size_t i = 0; i < pending.by_rank.size(); ++i) {
      const auto& entry = pending.by_rank[i];
      if (!entry.has_value() || entry->kind != CollectiveKind::kRegister) continue;
      crossed = &by_name[ListName(entry->description)];
      crossed->first.emplace(ranks_[i], *entry);
    }
    if (crossed != nullptr) crossed->keys.push_back(key);
  }
  for (auto& [name, crossed] : by_name) {
    if (crossed.first.size() + joined_.size() < ranks_.size()) continue;
    RefuseRegistrations(std::move(crossed.first), crossed.keys);
  }
}

void Negotiator::RefuseRegistrations(std::map<int32_t, RequestInfo> by_rank,
                                     const std::vector<std::string>& keys) {
  std::vector<int32_t> members;
  std::vector<RequestInfo> lists;
  for (auto& [rank, info] : by_rank) {
    members.push_back(rank);
    lists.push_back(std::move(info));
  }
  const Status error = CheckRequestsMatch(lists, members);
  for (const std::string& key : keys) {
    Response response;
    response.keys = {key};
    response.error = error;
    refused_.push_back(std::move(response));
    pending_.erase(key);
  }
}

std::vector<Response> Negotiator::TakeResponses() {
  if (refused_.empty() && ready_.empty()) return {};
  std::vector<Response> responses = std::move(refused_);
  refused_.clear();
  std::vector<Ready> agreed;
  for (Ready& ready : ready_) {
    Response response;
    response.error = CheckRequestsMatch(ready.by_rank, Members());
    if (response.error.ok() && !ready.joined.empty()) {
      response.error = CheckJoined(ready.by_rank[0], ready.joined);
      response.ends_work = !response.error.ok();
    }
    // Where ranks do not even agree on what they call, they have counted differently.
    response.ends_work |= !response.error.ok() && IsCounted(ready.by_rank);
    if (response.error.ok()) {
      for (int32_t rank : ready.joined) {
        RequestInfo& info = ready.by_rank[Index(rank)];
        info = JoinedInfo(info, static_cast<int>(ranks_.size()));
      }
      agreed.push_back(std::move(ready));
      continue;
    }
    AddKey(ready.by_rank, ready.joined, 0, &response);
    responses.push_back(std::move(response));
  }
  ready_.clear();
  std::vector<RequestInfo> flat;
  for (const Ready& ready : agreed) flat.push_back(ready.by_rank[0]);
  for (size_t at = 0; at < agreed.size();) {
    size_t end = at;  // of those that the same ranks ask for
    while (end < agreed.size() && agreed[end].joined == agreed[at].joined) ++end;
    const auto begin = flat.begin();
    for (int count : FuseRequests(
             {begin + static_cast<std::ptrdiff_t>(at), begin + static_cast<std::ptrdiff_t>(end)},
             fusion_bytes_, algorithm_of_)) {
      Response response = Answer(agreed[at].by_rank);
      response.ticket = next_ticket_++;
      for (; count > 0; --count, ++at) {
        AddKey(agreed[at].by_rank, agreed[at].joined, NumberFor(agreed[at].by_rank), &response);
        response.last = agreed[at].last;  // they stand in the order in which they were complete
      }
      responses.push_back(std::move(response));
    }
  }
  return responses;
}

// Returns all that the ranks learn from an agreement, besides the fact that they agree.
Response Negotiator::Answer(const std::vector<RequestInfo>& by_rank) {
  Response response;
  const RequestInfo& first = by_rank[0];
  response.rows = AgreedRows(by_rank, static_cast<int>(Index(first.root)));
  for (const RequestInfo& info : by_rank) {
    if (info.kind == CollectiveKind::kRegister) {
      response.present.resize(info.present.size());
      for (size_t i = 0; i < info.present.size(); ++i) response.present[i] |= info.present[i];
    }
  }
  if (first.kind == CollectiveKind::kRegister && groups_.size() < kMaxGroupNumber) {
    response.number = groups_.size() + 1;
    groups_[static_cast<uint32_t>(response.number)] = first.description;
  }
  if (first.kind == CollectiveKind::kAddSet) {
    response.error = sets_->Add(first.description, &response.number);
  }
  if (first.kind == CollectiveKind::kRemoveSet) response.error = sets_->Remove(first.description);
  return response;
}

uint32_t Negotiator::NumberFor(const std::vector<RequestInfo>& by_rank) {
  const bool repeat = std::all_of(by_rank.begin(), by_rank.end(),
                                  [](const RequestInfo& info) { return info.repeats; });
  if (!repeat || (repeated_.size() == kMostRepeated && repeated_.count(by_rank[0].key) == 0)) {
    return 0;
  }
  Repeated& repeated = repeated_[by_rank[0].key];
  ++repetitions_;
  if (repeated.has_number || ++repeated.times % kTimes != 0) return 0;
  const uint64_t since = std::exchange(repeated.since, repetitions_);
  const bool is_first = std::exchange(repeated.times, 0) == 0;
  const bool is_in_crowd = repetitions_ - since > kMostRepetitions;
  if (is_first || is_in_crowd || numbers_ == kMaxRepeated) return 0;
  repeated.has_number = true;
  return ++numbers_;
}

Stall Negotiator::Describe(const Pending& pending, int64_t own_us) const {
  const RequestInfo* info = nullptr;
  std::vector<int> missing;
  for (size_t i = 0; i < pending.by_rank.size(); ++i) {
    if (pending.by_rank[i].has_value()) info = &*pending.by_rank[i];
    if (Waits(pending, i)) missing.push_back(ranks_[i]);
  }
  return MakeStall(*info, own_us - pending.since_us, std::move(missing));
}

std::vector<Stall> Negotiator::TakeStalls(int64_t own_us, int64_t warning_us) {
  std::vector<Stall> stalls;
  for (auto& [key, pending] : pending_) {
    if (own_us - pending.reported_us < warning_us) continue;
    pending.reported_us = own_us;
    stalls.push_back(Describe(pending, own_us));
  }
  return stalls;
}

std::map<std::string, std::vector<int32_t>> Negotiator::Missing() const {
  std::map<std::string, std::vector<int32_t>> missing;
  for (const auto& [key, pending] : pending_) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (Waits(pending, i)) missing[key].push_back(ranks_[i]);
    }
  }
  return missing;
}

bool Negotiator::WaitsFor(int rank) const {
  const size_t index = Index(rank);
  return index < ranks_.size() && std::any_of(
                                      pending_.begin(), pending_.end(),
                                      [&](const auto& item) { return Waits(item.second, index); });
}

const RequestInfo* Negotiator::Announced(int rank, const std::string& key) const {
  const auto it = pending_.find(key);
  const size_t index = Index(rank);
  if (it == pending_.end() || index == ranks_.size()) return nullptr;
  const std::optional<RequestInfo>& info = it->second.by_rank[index];
  return info.has_value() ? &*info : nullptr;
}

const RequestInfo* Negotiator::Registration(int rank) const {
  for (const auto& [key, pending] : pending_) {
    const RequestInfo* info = Announced(rank, key);
    if (info != nullptr && info->kind == CollectiveKind::kRegister) return info;
  }
  return nullptr;
}

const std::string& Negotiator::GroupDescription(uint32_t number) const {
  static const std::string none;
  const auto it = groups_.find(number);
  return it != groups_.end() ? it->second : none;
}

std::optional<Stall> Negotiator::Expired(int64_t own_us) const {
  for (const auto& [key, pending] : pending_) {
    double timeout_s = 0;
    for (const auto& entry : pending.by_rank) {
      if (!entry.has_value()) continue;
      timeout_s = timeout_s <= 0 ? entry->timeout_s : std::min(timeout_s, entry->timeout_s);
    }
    if (static_cast<double>(own_us - pending.since_us) > timeout_s * 1e6) {
      return Describe(pending, own_us);
    }
  }
  return std::nullopt;
}

}  // namespace tfdist
