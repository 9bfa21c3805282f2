// Process sets: finding, opening and removing them, and who may use them.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "scheduler/check_request.h"
#include "scheduler/engine.h"

namespace tfdist {
namespace {

uint32_t ParseId(const std::string& text) {
  return static_cast<uint32_t>(std::strtoul(text.c_str(), nullptr, 10));
}

}  // namespace

bool Engine::busy() const {
  return !stopped_requests_.empty() ||
         std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& item) { return item.second->busy(); });
}

size_t Engine::stashed() const {
  size_t frames = 0;
  for (const auto& [id, set] : sets_) {
    for (const auto& [ticket, arrived] : set->stash) frames += arrived.size();
  }
  return frames;
}

bool Engine::waiting() const {
  const bool undecided = agreement_.active() && agreement_.outcome() == Outcome::kNone;
  return busy() || undecided || doubting() ||
         std::any_of(sets_.begin(), sets_.end(), [](const auto& item) {
           const ProcessSet& set = *item.second;
           return set.negotiator != nullptr &&
                  !(set.negotiator->empty() && set.waits->empty() && set.joins->empty());
         });
}

ProcessSet* Engine::FindOrCreateSet(uint32_t id) {
  const auto known = sets_.find(id);
  if (known != sets_.end()) return known->second.get();
  std::vector<int32_t> pair = PairSetRanks(id, world_.size);
  if (id >= kPairFlag && pair.empty()) return nullptr;
  auto made = std::make_unique<ProcessSet>(id);
  ProcessSet* set = made.get();
  sets_[id] = std::move(made);
  if (!pair.empty()) OpenSet(set, std::move(pair));
  return set;
}

std::vector<int32_t> WorldHosts(const World& world) {
  std::vector<int32_t> hosts = world.host_of;
  if (hosts.empty() && world.local_size != world.size) {
    for (int32_t rank = 0; rank < world.size; ++rank) hosts.push_back(rank);
  }
  return hosts;
}

void Engine::OpenSet(ProcessSet* set, std::vector<int32_t> ranks) {
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
  set->waits = std::make_unique<Waits>(set->ranks);
  set->joins = std::make_unique<Joins>(set->ranks);
}

Status Engine::CheckSet(const Request& request) const {
  const RequestInfo& info = request.info;
  const auto known = sets_.find(info.set);
  if (known != sets_.end() && known->second->joining != nullptr) {
    const std::string cause = "this rank has joined, and takes part in what others call alone";
    return Status(Code::kFailedPrecondition,
                  "\"" + info.key + "\": " + cause +
                      ", until all ranks have called tfdist.join(). Call it before, or after it.",
                  ErrorRecord{"mismatch", world_.rank, "", 0, info.key, cause, ""});
  }
  if (info.set == kWorldSet) return Status();
  std::vector<int32_t> ranks = PairSetRanks(info.set, world_.size);
  if (known != sets_.end()) ranks = known->second->ranks;
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
  if (known != sets_.end() && known->second->closing) {
    return InvalidRequest(info.key, name + " is being removed");
  }
  return Status();
}

// From here on until the answer nothing may be submitted to a set that is removed: "nothing is in
// flight" must still be true when all ranks have said so.
void Engine::BeginSetChange(Request* request) {
  if (request->info.kind != CollectiveKind::kRemoveSet) return;
  const auto it = sets_.find(ParseId(request->info.description));
  const bool known = it != sets_.end() && it->first != kWorldSet;
  request->info.present = {static_cast<uint8_t>(known && it->second->busy())};
  if (known) it->second->closing = true;
}

void Engine::EndSetChange(const Request& request, const Response& response, int64_t now_us) {
  const RequestInfo& info = request.info;
  if (info.kind == CollectiveKind::kRemoveSet) {
    const auto it = sets_.find(ParseId(info.description));
    if (it == sets_.end() || it->first == kWorldSet) return;
    if (response.error.ok()) {
      sets_.erase(it);
    } else {
      it->second->closing = false;
    }
  }
  if (info.kind != CollectiveKind::kAddSet || !response.error.ok()) return;
  ProcessSet* set = FindOrCreateSet(static_cast<uint32_t>(response.number));
  if (set == nullptr || !set->ranks.empty()) return;  // known already
  OpenSet(set, ParseSetRanks(info.description));
  auto early = std::move(set->early);
  auto early_joins = std::move(set->early_joins);
  for (auto& [rank, ready] : early) {
    if (!stopped_ && set->negotiator != nullptr) {
      AddReady(set, rank, std::move(ready), now_us);
    }
  }
  for (const auto& [rank, message] : early_joins) {
    HandleControl(rank, FrameType::kJoin, set->id, AsBytes(message), now_us);
  }
}

}  // namespace tfdist
