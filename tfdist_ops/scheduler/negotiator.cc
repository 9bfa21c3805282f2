#include "scheduler/negotiator.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#include "scheduler/agreement.h"
#include "scheduler/order.h"
#include "scheduler/process_set.h"
#include "scheduler/rows.h"

namespace tfdist {
namespace {

std::vector<int32_t> WorldRanks(int size) {
  std::vector<int32_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
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

std::vector<int> FuseRequests(const std::vector<RequestInfo>& ready, int64_t fusion_bytes) {
  std::vector<int> batches;
  int64_t bytes = 0;
  for (size_t i = 0; i < ready.size(); ++i) {
    const RequestInfo& info = ready[i];
    int64_t own = 0;
    for (const auto& shape : info.shapes) {
      own += ElementCount(shape) * static_cast<int64_t>(DTypeSize(info.dtype));
    }
    const bool fits = i > 0 && info.kind == CollectiveKind::kAllreduce &&
                      ready[i - 1].kind == CollectiveKind::kAllreduce && !info.bucket &&
                      !ready[i - 1].bucket && info.dtype == ready[i - 1].dtype &&
                      info.op == ready[i - 1].op && info.prescale == ready[i - 1].prescale &&
                      info.postscale == ready[i - 1].postscale && bytes + own <= fusion_bytes;
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

Negotiator::Negotiator(std::vector<int32_t> ranks, int64_t fusion_bytes,
                       std::unique_ptr<SetTable> sets)
    : ranks_(std::move(ranks)), fusion_bytes_(fusion_bytes), sets_(std::move(sets)) {}

Negotiator::Negotiator(int size, int64_t fusion_bytes)
    : Negotiator(WorldRanks(size), fusion_bytes) {}

Negotiator::~Negotiator() = default;

size_t Negotiator::Index(int rank) const {
  return static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

std::vector<int32_t> Negotiator::Members() const {
  const bool is_world = ranks_.back() == static_cast<int32_t>(ranks_.size()) - 1;
  return is_world ? std::vector<int32_t>() : ranks_;
}

Status Negotiator::Add(int rank, RequestInfo info, int64_t now_us) {
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
    pending.since_us = now_us;
    pending.reported_us = now_us;
  }
  std::optional<RequestInfo>& place = pending.by_rank[index];
  if (place.has_value()) {
    return TFDIST_INTERNAL("rank " + std::to_string(rank) + " announced \"" + key + "\" twice");
  }
  place = std::move(info);
  if (static_cast<size_t>(++pending.count) == ranks_.size()) {
    std::vector<RequestInfo> by_rank;
    for (auto& entry : pending.by_rank) by_rank.push_back(std::move(*entry));
    pending_.erase(key);
    ready_.push_back(std::move(by_rank));
  } else if (is_register) {
    RefuseCrossedRegistrations();
  }
  return Status();
}

void Negotiator::RefuseCrossedRegistrations() {
  std::vector<RequestInfo> first(ranks_.size());
  std::vector<std::string> keys;
  size_t found = 0;
  for (const auto& [key, pending] : pending_) {
    bool is_register = false;
    for (size_t i = 0; i < pending.by_rank.size(); ++i) {
      const auto& entry = pending.by_rank[i];
      if (!entry.has_value() || entry->kind != CollectiveKind::kRegister) continue;
      is_register = true;
      if (first[i].key.empty()) {
        first[i] = *entry;
        ++found;
      }
    }
    if (is_register) keys.push_back(key);
  }
  if (found < ranks_.size()) return;
  const Status error = CheckAgreement(first, Members());
  for (const std::string& key : keys) {
    Response response;
    response.keys = {key};
    response.error = error;
    refused_.push_back(std::move(response));
    pending_.erase(key);
  }
}

std::vector<Response> Negotiator::TakeResponses() {
  std::vector<Response> responses = std::move(refused_);
  refused_.clear();
  std::vector<std::vector<RequestInfo>> agreed;
  for (std::vector<RequestInfo>& by_rank : ready_) {
    Status error = CheckAgreement(by_rank, Members());
    if (error.ok()) {
      agreed.push_back(std::move(by_rank));
      continue;
    }
    Response response;
    response.keys = {by_rank[0].key};
    response.error = std::move(error);
    responses.push_back(std::move(response));
  }
  ready_.clear();
  std::vector<RequestInfo> flat;
  for (const auto& by_rank : agreed) flat.push_back(by_rank[0]);
  size_t at = 0;
  for (int count : FuseRequests(flat, fusion_bytes_)) {
    Response response = Answer(agreed[at]);
    response.ticket = next_ticket_++;
    for (int i = 0; i < count; ++i) response.keys.push_back(flat[at + static_cast<size_t>(i)].key);
    at += static_cast<size_t>(count);
    responses.push_back(std::move(response));
  }
  return responses;
}

// What the ranks learn by agreeing, beside that they do.
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

Stall Negotiator::Describe(const Pending& pending, int64_t now_us) const {
  const RequestInfo* info = nullptr;
  std::vector<int> missing;
  for (size_t i = 0; i < pending.by_rank.size(); ++i) {
    if (pending.by_rank[i].has_value()) {
      info = &*pending.by_rank[i];
    } else {
      missing.push_back(ranks_[i]);
    }
  }
  return MakeStall(*info, now_us - pending.since_us, std::move(missing));
}

std::vector<Stall> Negotiator::TakeStalls(int64_t now_us, int64_t warning_us) {
  std::vector<Stall> stalls;
  for (auto& [key, pending] : pending_) {
    if (now_us - pending.reported_us < warning_us) continue;
    pending.reported_us = now_us;
    stalls.push_back(Describe(pending, now_us));
  }
  return stalls;
}

bool Negotiator::WaitsFor(int rank) const {
  const size_t index = Index(rank);
  return index < ranks_.size() &&
         std::any_of(
             pending_.begin(), pending_.end(),
             [index](const auto& item) { return !item.second.by_rank[index].has_value(); });
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

std::optional<Stall> Negotiator::Expired(int64_t now_us) const {
  for (const auto& [key, pending] : pending_) {
    double timeout_s = 0;
    for (const auto& entry : pending.by_rank) {
      if (!entry.has_value()) continue;
      timeout_s = timeout_s <= 0 ? entry->timeout_s : std::min(timeout_s, entry->timeout_s);
    }
    if (static_cast<double>(now_us - pending.since_us) > timeout_s * 1e6) {
      return Describe(pending, now_us);
    }
  }
  return std::nullopt;
}

}  // namespace tfdist
