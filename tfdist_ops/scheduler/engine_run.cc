// Running the agreed operations.
#include <limits>
#include <utility>

#include "scheduler/engine.h"

namespace tfdist {
namespace {

// An operation that has not moved for so long takes no place in the window of those that run.
constexpr int64_t kIdleUs = 1000;
// Inside a host no operation begins beside so many bytes: those of several would push each other
// out of the caches through which ranks hand them over (docs/design/0010). Between hosts they fill
// each other's gaps.
constexpr int64_t kWindowBytes = int64_t{4} << 20;

}  // namespace

// ---- execution ----

void Engine::Start(ProcessSet* set, uint64_t ticket, std::vector<std::unique_ptr<Request>> members,
                   int64_t now_us) {
  std::vector<TensorView> tensors;
  for (const auto& member : members) {
    tensors.insert(tensors.end(), member->tensors.begin(), member->tensors.end());
  }
  StatusOr<Plan> plan = PlanOperation({members[0]->info, tensors, members[0]->rows, *set}, config_);
  if (!plan.ok()) {
    failures_.ReportBug(plan.status(), now_us);
    for (auto& member : members) Finish(std::move(member), plan.status());
    return;
  }
  const int64_t step_bytes = IsPredicted(ticket) ? set->book.GroupBytes(ticket) : 0;
  auto operation =
      std::make_unique<Operation>(set->id, ticket, std::move(members), std::move(plan.value()),
                                  *set, recorder_.clock(), step_bytes);
  if (!DeliverEarly(set, operation.get(), now_us)) return;
  set->active[TurnOf(ticket)] = {std::move(operation), now_us};
}

bool Engine::DeliverEarly(ProcessSet* set, Operation* operation, int64_t now_us) {
  operation->trace().Start(recorder_.NowUs(now_us));
  data_lane_.DeliverEarly(set, operation, now_us);
  if (!state_.stopped) return true;
  operation->ReleaseFrames(links_, data_lane_.held());
  for (auto& member : operation->members()) EndStopped(std::move(member));
  return false;
}

bool Engine::StartKept(ProcessSet* set, std::unique_ptr<Request>* request, int64_t now_us) {
  const uint64_t ticket = (*request)->info.predicted;
  const auto kept = set->kept.find(BucketKey(ticket));
  if (kept == set->kept.end() || kept->second.empty()) return false;
  ProcessSet::ActiveMap::node_type node = std::move(kept->second);
  // It may have run what the bucket was before, and have ended since.
  if (node.mapped().agreement != set->book.Agreements(ticket)) return false;
  node.key() = TurnOf(ticket);
  node.mapped().moved_us = now_us;
  Operation* operation = node.mapped().operation.get();
  operation->Restart(ticket, std::move(*request), recorder_.clock());
  if (DeliverEarly(set, operation, now_us)) set->active.insert(std::move(node));
  return true;
}

void Engine::Allocated(uint32_t id, uint64_t ticket, void* memory, int64_t now_us) {
  ProcessSet* set = sets_.Find(id);
  if (set == nullptr) return;
  const auto it = set->allocating.find(ticket);
  if (it == set->allocating.end()) return;  // failed meanwhile
  std::unique_ptr<Request> request = std::move(it->second);
  set->allocating.erase(it);
  if (memory == nullptr) {
    const Status status(Code::kInternal, std::string(CollectiveKindName(request->info.kind)) +
                                             " \"" + request->info.key +
                                             "\": no memory for its output");
    Finish(std::move(request), status);
    failures_.ReportBug(status, now_us);
    return;
  }
  request->tensors[0].output = static_cast<uint8_t*>(memory);
  std::vector<std::unique_ptr<Request>> members;
  members.push_back(std::move(request));
  Start(set, ticket, std::move(members), now_us);
}

bool Engine::AdvanceAll(int64_t now_us) {
  bool moved = false;
  for (auto& [id, set] : sets_) moved |= AdvanceSet(set.get(), now_us);
  return moved;
}

bool Engine::AdvanceSet(ProcessSet* set, int64_t now_us) {
  bool moved = false;
  int64_t running = 0;
  int64_t running_bytes = 0;
  const int64_t most_bytes = set->local ? kWindowBytes : std::numeric_limits<int64_t>::max();
  std::vector<uint64_t> ended = std::move(ended_tickets_);
  std::vector<std::unique_ptr<Request>> members = std::move(ended_requests_);
  for (auto it = set->active.begin();
       it != set->active.end() && running < config_.max_active && running_bytes < most_bytes;) {
    Operation& operation = *it->second.operation;
    if (operation.Advance(links_, world_.generation, data_lane_.held())) {
      it->second.moved_us = now_us;
      if (!set->copied.empty()) set->copied.erase(operation.ticket());
      moved = true;
    }
    if (!operation.complete()) {
      // One that stands still, maybe because a rank has yet to submit it, must not keep out others
      // (see order.h).
      if (now_us - it->second.moved_us < kIdleUs) {
        ++running;
        running_bytes += operation.bytes();
      }
      ++it;
      continue;
    }
    moved = true;
    ended.push_back(operation.ticket());
    if (recorder_.records()) recorder_.KeepTrace(&operation);
    const bool keep = IsPredicted(operation.ticket()) && operation.IsWorthKeeping();
    for (auto& member : operation.members()) members.push_back(std::move(member));
    auto node = set->active.extract(it++);
    if (keep) set->kept[BucketKey(operation.ticket())] = std::move(node);
  }
  for (auto& member : members) gate_.End(set, std::move(member), Status(), now_us);
  for (uint64_t ticket : ended) NoteEnd(set, ticket, now_us);
  ended.clear();
  members.clear();
  ended_tickets_ = std::move(ended);
  ended_requests_ = std::move(members);
  return moved;
}

}  // namespace tfdist
