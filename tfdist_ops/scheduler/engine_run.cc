// Running the agreed operations, and reading the data that they wait for.
#include <limits>
#include <utility>

#include "scheduler/engine.h"

namespace tfdist {
namespace {

constexpr int kFramesPerTurn = 64;  // of one link, so that no peer starves the others
// An operation that has not moved for so long takes no place in the window of those that run.
constexpr int64_t kIdleUs = 1000;
// A lane that is full of frames for operations that have not moved for so long is emptied by
// copying.
constexpr int64_t kStuckUs = 2000;
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
    Bug(plan.status(), now_us);
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
  const uint64_t ticket = operation->ticket();
  operation->trace().Start(recorder_.NowUs(now_us));
  if (!set->copied.empty()) set->copied.erase(ticket);
  auto stashed = set->stash.extract(ticket);
  if (!stashed.empty()) {
    for (auto& [peer, arrived] : stashed.mapped()) {
      OperationTrace::Wait wait;  // what came before this rank was ready it has not waited for
      const Status status = operation->Deliver(peer, std::move(arrived), now_us, &wait);
      if (!status.ok()) {
        Bug(status, now_us);
        break;
      }
    }
    stashed.mapped().clear();
    set->spare_room = std::move(stashed);
  }
  if (!state_.stopped) return true;
  operation->ReleaseFrames(links_, &held_);
  for (auto& member : operation->members()) EndRequest(std::move(member));
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
    Bug(status, now_us);
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
    if (operation.Advance(links_, world_.generation, &held_)) {
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
  for (auto& member : members) EndMember(set, std::move(member), Status(), now_us);
  for (uint64_t ticket : ended) NoteEnd(set, ticket, now_us);
  ended.clear();
  members.clear();
  ended_tickets_ = std::move(ended);
  ended_requests_ = std::move(members);
  return moved;
}

// ---- the data lane ----

bool Engine::EmptyFullLanes(int64_t now_us) {
  bool emptied = false;
  for (size_t p = 0; p < links_.size(); ++p) {
    Link* link = links_[p].get();
    if (link == nullptr || held_[p] == 0 || held_[p] < link->MaxHeld()) {
      full_since_us_[p] = 0;
      continue;
    }
    if (full_since_us_[p] == 0) full_since_us_[p] = now_us;
    const int peer = static_cast<int>(p);
    const auto is_stuck = [&](int64_t since_us) { return asleep_ || now_us - since_us > kStuckUs; };
    const auto note = [&](ProcessSet* set, uint64_t ticket) {
      set->copied.insert(ticket);
      emptied = true;
    };
    // Only for the sake of others: what waits alone loses nothing when its peer waits too.
    std::vector<const Operation*> waiting;
    for (const auto& [id, set] : sets_) {
      for (const auto& [turn, active] : set->active) {
        if (active.operation->Awaits(peer)) waiting.push_back(active.operation.get());
      }
    }
    if (waiting.empty()) continue;
    for (auto& [id, set] : sets_) {
      for (auto& [turn, active] : set->active) {
        const bool alone = waiting.size() == 1 && waiting[0] == active.operation.get();
        if (!alone && is_stuck(active.moved_us) &&
            active.operation->CopyHeld(peer, link, &held_[p])) {
          note(set.get(), active.operation->ticket());
        }
      }
      if (!is_stuck(full_since_us_[p])) continue;
      for (auto& [ticket, frames] : set->stash) {
        if (CopyEarly(&frames, peer)) note(set.get(), ticket);
      }
    }
  }
  return emptied;
}

void Engine::CopyFrames(int peer) {
  const auto p = static_cast<size_t>(peer);
  Link* link = links_[p].get();
  if (link == nullptr || held_[p] == 0) return;
  for (auto& [id, set] : sets_) {
    for (auto& [turn, active] : set->active) active.operation->CopyHeld(peer, link, &held_[p]);
    for (auto& [ticket, frames] : set->stash) CopyEarly(&frames, peer);
  }
}

bool Engine::CopyEarly(std::vector<std::pair<int, Arrived>>* frames, int peer) {
  const auto p = static_cast<size_t>(peer);
  bool copied = false;
  for (auto& [from, arrived] : *frames) {
    if (from == peer) copied |= arrived.CopyOut(links_[p].get(), &held_[p]);
  }
  return copied;
}

bool Engine::ReadData(int peer, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  bool moved = false;
  InFrame frame;
  for (int n = 0; n < kFramesPerTurn && links_[p] != nullptr; ++n) {
    if (!links_[p]->Poll(Lane::kData, &frame)) break;
    moved = true;
    monitor_.Heard(peer);
    if (state_.stopped) {
      links_[p]->Release(Lane::kData, frame);
      continue;
    }
    const Status status = ReceiveData(peer, frame, now_us);
    if (!status.ok()) Bug(status, now_us);
  }
  return moved;
}

// Never leaves a frame unread, whatever its set is waiting for, so that the frames behind it, which
// may be another set's, move on. Frames are held where they lie, also those that come before their
// operation: a peer that is ahead then waits. When they fill up a lane and stand still, they are
// copied out (EmptyFullLanes), and so are those that follow, until their operation moves again.
Status Engine::ReceiveData(int peer, const InFrame& frame, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  const FrameHeader& header = frame.header;
  ProcessSet* set = sets_.FindOrCreate(header.set);
  const bool is_member =
      set != nullptr && (set->ranks.empty() || (set->IndexOf(peer) >= 0 && set->index >= 0));
  if (header.generation != world_.generation || !is_member) {
    links_[p]->Release(Lane::kData, frame);
    return TFDIST_INTERNAL(DescribeRank(world_, peer) + " sent data of generation " +
                           std::to_string(header.generation) + " of process set " +
                           std::to_string(header.set));
  }
  const auto it = set->active.find(TurnOf(header.ticket));
  const bool runs = it != set->active.end();
  const bool may_hold = set->copied.empty() || set->copied.count(header.ticket) == 0;
  Arrived arrived{frame, {}, may_hold && held_[p] < links_[p]->MaxHeld()};
  const bool held = arrived.held;
  if (held) {
    ++held_[p];
  } else {
    arrived.copy.assign(frame.payload.begin(), frame.payload.end());
    links_[p]->Release(Lane::kData, frame);
  }
  if (!runs) {
    auto room = set->stash.find(header.ticket);
    if (room == set->stash.end() && !set->spare_room.empty()) {
      set->spare_room.key() = header.ticket;
      room = set->stash.insert(std::move(set->spare_room)).position;
    } else if (room == set->stash.end()) {
      room = set->stash.try_emplace(header.ticket).first;
    }
    room->second.emplace_back(peer, std::move(arrived));
    return Status();
  }
  Operation& operation = *it->second.operation;
  OperationTrace::Wait wait;
  const int64_t heard_us = recorder_.NowUs(now_us);
  const Status status = operation.Deliver(peer, std::move(arrived), heard_us, &wait);
  if (wait.peer >= 0) {
    recorder_.CountWait(set->ranks[static_cast<size_t>(wait.peer)], wait.since_us, wait.until_us);
  }
  if (!status.ok()) {
    if (held) {
      links_[p]->Release(Lane::kData, frame);
      --held_[p];
    }
    return status;
  }
  // Use it while it is in the cache, and give the room back to the peer early.
  if (operation.Advance(links_, world_.generation, &held_)) it->second.moved_us = now_us;
  return Status();
}

}  // namespace tfdist
