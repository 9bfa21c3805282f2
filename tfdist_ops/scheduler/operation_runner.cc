#include "scheduler/operation_runner.h"

#include <limits>
#include <utility>

#include "scheduler/operation_plan.h"
#include "scheduler/row_counts.h"

namespace tfdist {
namespace {

// An operation that has not moved for so long takes no place in the window of those that run.
constexpr int64_t kIdleUs = 1000;
// Inside a host, no further operation runs while those that run have so many bytes: they would
// push each other's data out of the caches through which ranks hand it over (docs/design/0010).
// Between hosts, operations fill each other's gaps.
constexpr int64_t kWindowBytes = int64_t{4} << 20;

}  // namespace

void OperationRunner::Start(ProcessSet* set, uint64_t ticket,
                            std::vector<std::unique_ptr<Request>> members, int64_t now_us) {
  std::vector<TensorView> tensors;
  for (const auto& member : members) {
    tensors.insert(tensors.end(), member->tensors.begin(), member->tensors.end());
  }
  StatusOr<Plan> plan =
      PlanOperation({members[0]->info, tensors, members[0]->rows, *set}, access_.config);
  if (!plan.ok()) {
    access_.failures->ReportBug(plan.status(), now_us);
    for (auto& member : members) access_.requests->Finish(std::move(member), plan.status());
    return;
  }
  const int64_t step_bytes = IsPredicted(ticket) ? set->book.GroupBytes(ticket) : 0;
  auto operation =
      std::make_unique<Operation>(set->id, ticket, std::move(members), std::move(plan.value()),
                                  *set, access_.recorder->clock(), step_bytes);
  if (!DeliverEarly(set, operation.get(), now_us)) return;
  set->active[TurnOf(ticket)] = {std::move(operation), now_us, access_.state.own_us};
}

bool OperationRunner::DeliverEarly(ProcessSet* set, Operation* operation, int64_t now_us) {
  operation->trace().Start(access_.recorder->NowUs(now_us));
  access_.data_lane->DeliverEarly(set, operation, now_us);
  if (!access_.state.stopped) return true;
  operation->ReleaseFrames(access_.links, access_.data_lane->held());
  for (auto& member : operation->members()) access_.requests->EndStopped(std::move(member));
  return false;
}

bool OperationRunner::StartKept(ProcessSet* set, std::unique_ptr<Request>* request,
                                int64_t now_us) {
  const uint64_t ticket = (*request)->info.predicted;
  const auto kept = set->kept.find(BucketKey(ticket));
  if (kept == set->kept.end() || kept->second.empty()) return false;
  ProcessSet::ActiveMap::node_type node = std::move(kept->second);
  // It may date from before the last agreement on the bucket, and no longer fit.
  if (node.mapped().agreement != set->book.Agreements(ticket)) return false;
  node.key() = TurnOf(ticket);
  node.mapped().moved_us = now_us;
  node.mapped().since_us = access_.state.own_us;
  Operation* operation = node.mapped().operation.get();
  operation->Restart(ticket, std::move(*request), access_.recorder->clock());
  if (DeliverEarly(set, operation, now_us)) set->active.insert(std::move(node));
  return true;
}

void OperationRunner::Allocate(ProcessSet* set, std::unique_ptr<Request> request,
                               const Response& response, int64_t now_us) {
  const RequestInfo& info = request->info;
  if (!RowsFit(response.rows, info, *set)) {
    access_.failures->ReportBug(
        TFDIST_INTERNAL(DescribeRank(access_.world, set->leader()) + " announced rows for \"" +
                        info.key + "\" that do not fit"),
        now_us);
    access_.requests->EndStopped(std::move(request));
    return;
  }
  request->rows = response.rows;
  access_.hooks.completions->Post(
      [allocate = request->allocate, allocated = access_.hooks.allocated, id = set->id,
       ticket = response.ticket, by_rank = SourceRows(response.rows, info, *set),
       output = OutputRows(response.rows, info, *set)] {
        allocated(id, ticket, allocate(by_rank, output));
      });
  set->allocating[response.ticket] = std::move(request);
}

void OperationRunner::OnAllocated(uint32_t id, uint64_t ticket, void* memory, int64_t now_us) {
  ProcessSet* set = access_.sets.Find(id);
  if (set == nullptr) return;
  const auto it = set->allocating.find(ticket);
  if (it == set->allocating.end()) return;  // failed meanwhile
  std::unique_ptr<Request> request = std::move(it->second);
  set->allocating.erase(it);
  if (memory == nullptr) {
    const Status status(Code::kInternal, std::string(CollectiveKindName(request->info.kind)) +
                                             " \"" + request->info.key +
                                             "\": no memory for its output");
    access_.requests->Finish(std::move(request), status);
    access_.failures->ReportBug(status, now_us);
    return;
  }
  request->tensors[0].output = static_cast<uint8_t*>(memory);
  std::vector<std::unique_ptr<Request>> members;
  members.push_back(std::move(request));
  Start(set, ticket, std::move(members), now_us);
}

bool OperationRunner::Advance(ProcessSet* set, int64_t now_us, Completed* completed) {
  bool moved = false;
  int64_t running = 0;
  int64_t running_bytes = 0;
  const int64_t most_bytes = set->local ? kWindowBytes : std::numeric_limits<int64_t>::max();
  for (auto it = set->active.begin(); it != set->active.end() &&
                                      running < access_.config.max_active &&
                                      running_bytes < most_bytes;) {
    Operation& operation = *it->second.operation;
    const bool ran =
        operation.Advance(access_.links, access_.world.generation, access_.data_lane->held());
    if (ran) it->second.moved_us = now_us;
    // Its last step may have run when its last frame came.
    const bool complete = operation.complete();
    moved |= ran || complete;
    if ((ran || complete) && !set->copied.empty()) set->copied.erase(operation.ticket());
    if (!complete) {
      // One that stands still, maybe because a rank has yet to submit it, must not keep out others
      // (see ticket_order.h).
      if (now_us - it->second.moved_us < kIdleUs) {
        ++running;
        running_bytes += operation.bytes();
      }
      ++it;
      continue;
    }
    completed->tickets.push_back(operation.ticket());
    if (access_.recorder->records()) access_.recorder->KeepTrace(&operation);
    const bool keep = IsPredicted(operation.ticket()) && operation.IsWorthKeeping();
    for (auto& member : operation.members()) {
      completed->requests.push_back(std::move(member));
    }
    auto node = set->active.extract(it++);
    if (keep) set->kept[BucketKey(operation.ticket())] = std::move(node);
  }
  return moved;
}

}  // namespace tfdist
