#include "scheduler/negotiator.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "scheduler/agreement.h"
#include "scheduler/rows.h"

namespace tfdist {

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

Status Negotiator::Add(int rank, RequestInfo info, int64_t now_us) {
  const std::string key = info.key;
  const bool is_register = info.kind == CollectiveKind::kRegister;
  Pending& pending = pending_[key];
  if (pending.by_rank.empty()) {
    pending.by_rank.resize(static_cast<size_t>(size_));
    pending.since_us = now_us;
    pending.reported_us = now_us;
  }
  std::optional<RequestInfo>& place = pending.by_rank[static_cast<size_t>(rank)];
  if (place.has_value()) {
    return TFDIST_INTERNAL("rank " + std::to_string(rank) + " announced \"" + key + "\" twice");
  }
  place = std::move(info);
  if (++pending.count == size_) {
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
  std::vector<RequestInfo> first(static_cast<size_t>(size_));
  std::vector<std::string> keys;
  size_t found = 0;
  for (const auto& [key, pending] : pending_) {
    bool is_register = false;
    for (size_t rank = 0; rank < pending.by_rank.size(); ++rank) {
      const auto& entry = pending.by_rank[rank];
      if (!entry.has_value() || entry->kind != CollectiveKind::kRegister) continue;
      is_register = true;
      if (first[rank].key.empty()) {
        first[rank] = *entry;
        ++found;
      }
    }
    if (is_register) keys.push_back(key);
  }
  if (found < static_cast<size_t>(size_)) return;
  const Status error = CheckAgreement(first);
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
    Status error = CheckAgreement(by_rank);
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
    Response response;
    response.ticket = next_ticket_++;
    for (int i = 0; i < count; ++i) response.keys.push_back(flat[at + static_cast<size_t>(i)].key);
    response.rows = AgreedRows(agreed[at], flat[at].root);
    for (const RequestInfo& info : agreed[at]) {
      if (info.kind == CollectiveKind::kRegister) {
        response.present.resize(info.present.size());
        for (size_t i = 0; i < info.present.size(); ++i) response.present[i] |= info.present[i];
      }
    }
    at += static_cast<size_t>(count);
    responses.push_back(std::move(response));
  }
  return responses;
}

Negotiator::Stall Negotiator::Describe(const std::string& key, const Pending& pending,
                                       int64_t now_us) const {
  Stall stall;
  stall.key = key;
  stall.age_us = now_us - pending.since_us;
  for (size_t rank = 0; rank < pending.by_rank.size(); ++rank) {
    if (pending.by_rank[rank].has_value()) {
      stall.kind = pending.by_rank[rank]->kind;
    } else {
      stall.missing.push_back(static_cast<int>(rank));
    }
  }
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f", static_cast<double>(stall.age_us) * 1e-6);
  stall.text = std::string(CollectiveKindName(stall.kind)) + " \"" + key + "\" has waited " +
               seconds + " s for " + RankList(stall.missing);
  return stall;
}

std::vector<Negotiator::Stall> Negotiator::TakeStalls(int64_t now_us, int64_t warning_us) {
  std::vector<Stall> stalls;
  for (auto& [key, pending] : pending_) {
    if (now_us - pending.reported_us < warning_us) continue;
    pending.reported_us = now_us;
    stalls.push_back(Describe(key, pending, now_us));
  }
  return stalls;
}

bool Negotiator::WaitsFor(int rank) const {
  return std::any_of(pending_.begin(), pending_.end(), [rank](const auto& item) {
    return !item.second.by_rank[static_cast<size_t>(rank)].has_value();
  });
}

std::optional<Negotiator::Stall> Negotiator::Expired(int64_t now_us) const {
  for (const auto& [key, pending] : pending_) {
    double timeout_s = 0;
    for (const auto& entry : pending.by_rank) {
      if (!entry.has_value()) continue;
      timeout_s = timeout_s <= 0 ? entry->timeout_s : std::min(timeout_s, entry->timeout_s);
    }
    if (static_cast<double>(now_us - pending.since_us) > timeout_s * 1e6) {
      return Describe(key, pending, now_us);
    }
  }
  return std::nullopt;
}

}  // namespace tfdist
