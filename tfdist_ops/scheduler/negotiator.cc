#include "scheduler/negotiator.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <sstream>
#include <utility>

#include "scheduler/order.h"
#include "scheduler/process_set.h"

namespace tfdist {
namespace {

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(ranks[i]);
  }
  return text;
}

// "rank 0: a; ranks 1,2: b" when the ranks' values differ, else "".
std::string Differences(const std::vector<RequestInfo>& by_rank, const std::vector<int32_t>& names,
                        const std::function<std::string(const RequestInfo&)>& value) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t i = 0; i < by_rank.size(); ++i) {
    const std::string text = value(by_rank[i]);
    auto it = std::find_if(groups.begin(), groups.end(),
                           [&](const auto& group) { return group.first == text; });
    if (it == groups.end()) it = groups.insert(groups.end(), {text, {}});
    it->second.push_back(names.empty() ? static_cast<int>(i) : names[i]);
  }
  if (groups.size() < 2) return "";
  std::string out;
  for (const auto& [text, ranks] : groups) {
    if (!out.empty()) out += "; ";
    out += RankList(ranks) + ": " + text;
  }
  return out;
}

std::string NumberText(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.17g", value);
  return buffer;
}

std::string ShapesText(const RequestInfo& info) {
  if (info.shapes.size() == 1) return ShapeText(info.shapes[0]);
  std::string text = std::to_string(info.shapes.size()) + " tensors";
  for (const auto& shape : info.shapes) text += " " + ShapeText(shape);
  return text;
}

// The part of an allgather's shape that must agree: all but the first dimension.
std::string RowShapeText(const RequestInfo& info) {
  if (info.shapes.empty() || info.shapes[0].empty()) return "[] (a scalar)";
  std::vector<int64_t> shape = info.shapes[0];
  std::string text = ShapeText(shape);
  shape.erase(shape.begin());
  return "rows of shape " + ShapeText(shape);
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The first place where the ranks' gradient lists part.
std::string DescriptionDifference(const std::vector<RequestInfo>& by_rank,
                                  const std::vector<int32_t>& names) {
  std::vector<std::vector<std::string>> lists;
  size_t longest = 0;
  for (const RequestInfo& info : by_rank) {
    lists.push_back(Lines(info.description));
    longest = std::max(longest, lists.back().size());
  }
  for (size_t i = 0; i < longest; ++i) {
    size_t at = 0;
    const std::string text = Differences(by_rank, names, [&](const RequestInfo&) {
      const std::vector<std::string>& list = lists[at++];
      return i < list.size() ? "\"" + list[i] + "\"" : std::string("nothing (its list is shorter)");
    });
    if (!text.empty()) return "entry " + std::to_string(i) + ": " + text;
  }
  return "";
}

Status Mismatch(const std::string& key, const std::string& what, const std::string& values,
                const std::string& remedy) {
  const std::string cause = "the ranks do not agree on " + what;
  return Status(Code::kFailedPrecondition,
                "\"" + key + "\": " + cause + ": " + values + ". " + remedy,
                ErrorRecord{"mismatch", -1, "", 0, key, cause, values});
}

std::vector<int32_t> WorldRanks(int size) {
  std::vector<int32_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// What ranks that change the process sets disagree on.
Status CheckSetAgreement(const std::vector<RequestInfo>& by_rank,
                         const std::vector<int32_t>& names) {
  const bool adds = by_rank[0].kind == CollectiveKind::kAddSet;
  const std::string text = Differences(by_rank, names, [&](const RequestInfo& i) {
    return adds ? "[" + i.description + "]" : i.description;
  });
  if (!text.empty()) {
    return Mismatch("process set", adds ? "the list of ranks" : "the process set to remove", text,
                    "Every rank of the world makes the same call, also one outside of the set.");
  }
  std::vector<int> busy;
  for (size_t i = 0; i < by_rank.size(); ++i) {
    if (by_rank[i].present.empty() || by_rank[i].present[0] == 0) continue;
    busy.push_back(names.empty() ? static_cast<int>(i) : names[i]);
  }
  if (busy.empty()) return Status();
  const std::string cause = "process set " + by_rank[0].description +
                            " can't be removed: " + RankList(busy) + " still " +
                            (busy.size() == 1 ? "has" : "have") + " operations of it in flight";
  return Status(Code::kFailedPrecondition, cause + ". Wait for their results first.",
                ErrorRecord{"mismatch", busy[0], "", 0, "process set", cause, ""});
}

}  // namespace

Status CheckAgreement(const std::vector<RequestInfo>& by_rank, const std::vector<int32_t>& ranks) {
  const std::string& key = by_rank[0].key;
  const auto differ = [&](const std::function<std::string(const RequestInfo&)>& value) {
    return Differences(by_rank, ranks, value);
  };
  std::string text =
      differ([](const RequestInfo& i) { return std::string(CollectiveKindName(i.kind)); });
  if (!text.empty()) {
    return Mismatch(key, "the operation", text,
                    "Call the same operation under one name everywhere.");
  }
  const CollectiveKind kind = by_rank[0].kind;
  if (kind == CollectiveKind::kBarrier) return Status();
  if (kind == CollectiveKind::kAddSet || kind == CollectiveKind::kRemoveSet) {
    return CheckSetAgreement(by_rank, ranks);
  }
  if (kind == CollectiveKind::kRegister) {
    text = DescriptionDifference(by_rank, ranks);
    if (text.empty()) return Status();
    return Mismatch("gradients", "the list of gradients", text,
                    "Build the same model, with the same variables, on every rank.");
  }
  text = differ([](const RequestInfo& i) { return std::string(DTypeName(i.dtype)); });
  if (!text.empty()) return Mismatch(key, "the dtype", text, "Cast to one dtype on every rank.");
  text = differ(kind == CollectiveKind::kAllgather ? &RowShapeText : &ShapesText);
  if (!text.empty()) {
    return Mismatch(key, "the shape", text,
                    kind == CollectiveKind::kAllgather
                        ? "All dimensions but the first must be equal."
                        : "Give it the same shape on every rank.");
  }
  if (kind == CollectiveKind::kBroadcast) {
    text = differ([](const RequestInfo& i) { return std::to_string(i.root); });
    if (!text.empty()) return Mismatch(key, "the root", text, "Name one root on every rank.");
  }
  if (kind == CollectiveKind::kAllreduce) {
    text = differ([](const RequestInfo& i) { return std::string(ReduceOpName(i.op)); });
    if (!text.empty()) return Mismatch(key, "the reduction", text, "Use one `op` on every rank.");
    text = differ([](const RequestInfo& i) {
      return "prescale " + NumberText(i.prescale) + ", postscale " + NumberText(i.postscale);
    });
    if (!text.empty()) return Mismatch(key, "the factors", text, "Use one factor on every rank.");
  }
  text = differ([](const RequestInfo& i) {
    if (!i.bucket) return std::string("outside of any group of gradients");
    return i.predicted == 0 ? std::string("a bucket") : TicketText(i.predicted);
  });
  if (!text.empty()) {
    return Mismatch(key, "which step of which group it belongs to", text,
                    "Every rank takes the same steps, with the same lists of gradients.");
  }
  return Status();
}

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
  const Status error = CheckAgreement(first, ranks_);
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
    Status error = CheckAgreement(by_rank, ranks_);
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
  for (const RequestInfo& info : by_rank) {
    if (info.kind == CollectiveKind::kAllgather) {
      response.rows.push_back(info.shapes[0].empty() ? 1 : info.shapes[0][0]);
    }
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
