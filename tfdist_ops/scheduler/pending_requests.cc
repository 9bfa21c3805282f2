#include "scheduler/pending_requests.h"

namespace tfdist {

void PendingRequests::ForEachInSets(const Visit& visit) const {
  for (const auto& [id, set] : sets_) {
    for (const auto& [key, queue] : set->entries) {
      for (const auto& request : queue) visit(*set, *request);
    }
    for (const auto& [turn, active] : set->active) {
      for (const auto& member : active.operation->members()) {
        if (member != nullptr) visit(*set, *member);
      }
    }
    for (const auto& [ticket, request] : set->allocating) visit(*set, *request);
    if (set->joining != nullptr) visit(*set, *set->joining);
    for (const auto& [number, group] : set->gated) {
      for (const auto& request : group.held) visit(*set, *request);
      for (const auto& request : group.later) visit(*set, *request);
    }
  }
}

const Request* PendingRequests::Find(uint64_t id) const {
  const Request* found = nullptr;
  ForEachInSets([&](const ProcessSet&, const Request& request) {
    if (request.id == id) found = &request;
  });
  for (const auto& request : stopped_) {
    if (request->id == id) found = request.get();
  }
  return found;
}

std::string PendingRequests::OldestKey() const {
  const Request* oldest = nullptr;
  const auto look = [&](const Request& request) {
    if (oldest == nullptr || request.submitted_us < oldest->submitted_us) oldest = &request;
  };
  ForEachInSets([&](const ProcessSet&, const Request& request) { look(request); });
  for (const auto& request : stopped_) look(*request);
  return oldest == nullptr ? "" : oldest->info.key;
}

void PendingRequests::StopAllOf(ProcessSet* set) {
  for (auto& [turn, active] : set->active) {
    for (auto& member : active.operation->members()) {
      if (member != nullptr) Stop(std::move(member));
    }
  }
  for (auto& [ticket, request] : set->allocating) Stop(std::move(request));
  for (auto& [key, queue] : set->entries) {
    for (auto& request : queue) Stop(std::move(request));
  }
  for (auto& [number, group] : set->gated) {
    for (auto& request : group.later) Stop(std::move(request));
    group.later.clear();
  }
  if (set->joining != nullptr) Stop(std::move(set->joining));
  set->active.clear();
  set->allocating.clear();
  set->entries.clear();
  set->early.clear();
}

}  // namespace tfdist
