#include "scheduler/process_set_registry.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "scheduler/operation_plan.h"
#include "scheduler/request_check.h"

namespace tfdist {
namespace {

uint32_t ParseId(const std::string& text) {
  return static_cast<uint32_t>(std::strtoul(text.c_str(), nullptr, 10));
}

}  // namespace

ProcessSetRegistry::ProcessSetRegistry(const World& world, const Config& config)
    : world_(world), config_(config) {
  Open(FindOrCreate(kWorldSet), AllRanks(world_.size));
}

bool ProcessSetRegistry::busy() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& item) { return item.second->busy(); });
}

bool ProcessSetRegistry::agreeing() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& item) { return !item.second->entries.empty(); });
}

bool ProcessSetRegistry::deciding() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& item) {
    const ProcessSet& set = *item.second;
    return set.negotiator != nullptr &&
           !(set.negotiator->empty() && set.stall_tracker->empty() && set.joins->empty());
  });
}

size_t ProcessSetRegistry::stashed() const {
  size_t frames = 0;
  for (const auto& [id, set] : sets_) {
    for (const auto& [ticket, arrived] : set->stash) frames += arrived.size();
  }
  return frames;
}

size_t ProcessSetRegistry::copied() const {
  size_t operations = 0;
  for (const auto& [id, set] : sets_) operations += set->copied.size();
  return operations;
}

ProcessSet* ProcessSetRegistry::Find(uint32_t id) const {
  const auto known = sets_.find(id);
  return known != sets_.end() ? known->second.get() : nullptr;
}

ProcessSet* ProcessSetRegistry::FindOrCreate(uint32_t id) {
  if (ProcessSet* known = Find(id)) return known;
  std::vector<int32_t> pair = PairSetRanks(id, world_.size);
  if (id >= kPairFlag && pair.empty()) return nullptr;
  auto made = std::make_unique<ProcessSet>(id);
  ProcessSet* set = made.get();
  sets_[id] = std::move(made);
  if (!pair.empty()) Open(set, std::move(pair));
  return set;
}

const AlgorithmEntry* ProcessSetRegistry::AlgorithmAloneOf(const SetView& set,
                                                           const RequestInfo& info) const {
  const StatusOr<const AlgorithmEntry*> entry = AlgorithmAlone(info, {}, set, config_);
  return entry.ok() ? entry.value() : nullptr;
}

void ProcessSetRegistry::Open(ProcessSet* set, std::vector<int32_t> ranks) {
  set->ranks = std::move(ranks);
  set->index = set->IndexOf(world_.rank);
  set->host_of = SetHosts(set->ranks, WorldHosts(world_));
  set->local = std::all_of(set->host_of.begin(), set->host_of.end(),
                           [set](int32_t host) { return host == set->host_of[0]; });
  set->rules = RulesFor(world_.tuning, {0, set->size(), 0, set->host_of});
  if (config_.atomic_steps != 0 && set->index >= 0) {
    set->gate = std::make_unique<CommitGate>(
        world_.rank, std::vector<int>(set->ranks.begin(), set->ranks.end()));
  }
  if (set->index != 0) return;
  const bool is_world = set->id == kWorldSet;
  set->negotiator = std::make_unique<Negotiator>(
      set->ranks, config_.fusion_bytes,
      [this, set](const RequestInfo& info) { return AlgorithmAloneOf(*set, info); },
      is_world ? std::make_unique<SetTable>(world_.size, world_.generation) : nullptr);
  set->stall_tracker = std::make_unique<StallTracker>(set->ranks);
  set->joins = std::make_unique<Joins>(set->id, set->ranks);
}

Status ProcessSetRegistry::Check(const Request& request) const {
  const RequestInfo& info = request.info;
  const ProcessSet* known = Find(info.set);
  if (known != nullptr && known->joining != nullptr) {
    const std::string cause = "this rank has joined, and only takes part in what others call";
    return Status(Code::kFailedPrecondition,
                  "\"" + info.key + "\": " + cause +
                      ", until all ranks have called tfdist.join(). Call it before tfdist.join(), "
                      "or after it returns.",
                  ErrorRecord{"mismatch", world_.rank, "", 0, info.key, cause, ""});
  }
  if (info.set == kWorldSet) return CheckSetSize(info, world_.size);
  std::vector<int32_t> ranks = PairSetRanks(info.set, world_.size);
  if (known != nullptr) ranks = known->ranks;
  const std::string name = "process set " + std::to_string(info.set);
  if (ranks.empty()) {
    return InvalidRequest(
        info.key, name +
                      " is not known: it was removed, or belongs to an earlier tfdist.init(). "
                      "Add it with tfdist.add_process_set()");
  }
  const auto has = [&](int rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); };
  if (!has(world_.rank)) {
    return InvalidRequest(info.key, "rank " + std::to_string(world_.rank) + " is not in " + name +
                                        ", which has ranks " + SetRanksText(ranks) +
                                        "; only they may call it");
  }
  if (known != nullptr && known->closing) {
    return InvalidRequest(info.key, name + " is being removed");
  }
  return CheckSetSize(info, static_cast<int>(ranks.size()));
}

// From here on until the answer nothing may be submitted to a set that is removed: "nothing is in
// flight" must still be true when all ranks have said so.
void ProcessSetRegistry::BeginChange(Request* request) {
  if (request->info.kind != CollectiveKind::kRemoveSet) return;
  const auto it = sets_.find(ParseId(request->info.description));
  const bool known = it != sets_.end() && it->first != kWorldSet;
  request->info.present = {static_cast<uint8_t>(known && it->second->busy())};
  if (known) it->second->closing = true;
}

ProcessSet* ProcessSetRegistry::EndChange(const Request& request, const Response& response) {
  const RequestInfo& info = request.info;
  if (info.kind == CollectiveKind::kRemoveSet) {
    const auto it = sets_.find(ParseId(info.description));
    if (it == sets_.end() || it->first == kWorldSet) return nullptr;
    if (response.error.ok()) {
      sets_.erase(it);
    } else {
      it->second->closing = false;
    }
  }
  if (info.kind != CollectiveKind::kAddSet || !response.error.ok()) return nullptr;
  ProcessSet* set = FindOrCreate(static_cast<uint32_t>(response.number));
  if (set == nullptr || !set->ranks.empty()) return nullptr;  // known already
  Open(set, ParseSetRanks(info.description));
  return set;
}

}  // namespace tfdist
