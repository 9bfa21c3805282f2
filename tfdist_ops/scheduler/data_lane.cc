#include "scheduler/data_lane.h"

#include <algorithm>

namespace tfdist {
namespace {

constexpr int kFramesPerTurn = 64;  // of one link, so that no peer starves the others
// A lane that is full of frames for operations that have not moved for so long is emptied by
// copying; kStuckAloneUs if a single operation awaits data of the peer.
constexpr int64_t kStuckUs = 2000;
constexpr int64_t kStuckAloneUs = 100000;

}  // namespace

DataLane::DataLane(const Access& access)
    : world_(access.world),
      links_(access.links),
      state_(access.state),
      sets_(*access.sets),
      monitor_(*access.monitor),
      recorder_(*access.recorder),
      failures_(*access.failures),
      held_(links_.size(), 0),
      full_since_us_(links_.size(), 0) {}

bool DataLane::HasFrame() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link != nullptr && link->HasFrame(); });
}

bool DataLane::EmptyFullLinks(int64_t now_us) {
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
    // Copy to let other operations go on. An operation that alone awaits data of this peer loses
    // nothing at first if the peer waits too, as for a slow third rank. But the peer may have
    // filled the lane with data of another step than the one that this rank has to do first.
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
        const bool stuck =
            alone ? now_us - active.moved_us > kStuckAloneUs : is_stuck(active.moved_us);
        if (stuck && active.operation->CopyHeld(peer, link, &held_[p])) {
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

void DataLane::CopyFrames(int peer) {
  const auto p = static_cast<size_t>(peer);
  Link* link = links_[p].get();
  if (link == nullptr || held_[p] == 0) return;
  for (auto& [id, set] : sets_) {
    for (auto& [turn, active] : set->active) active.operation->CopyHeld(peer, link, &held_[p]);
    for (auto& [ticket, frames] : set->stash) CopyEarly(&frames, peer);
  }
}

bool DataLane::CopyEarly(std::vector<std::pair<int, Arrived>>* frames, int peer) {
  const auto p = static_cast<size_t>(peer);
  bool copied = false;
  for (auto& [from, arrived] : *frames) {
    if (from == peer) copied |= arrived.CopyOut(links_[p].get(), &held_[p]);
  }
  return copied;
}

void DataLane::DeliverEarly(ProcessSet* set, Operation* operation, int64_t now_us) {
  const uint64_t ticket = operation->ticket();
  if (!set->copied.empty()) set->copied.erase(ticket);
  auto stashed = set->stash.extract(ticket);
  if (stashed.empty()) return;
  for (auto& [peer, arrived] : stashed.mapped()) {
    OperationTrace::Wait wait;  // not counted: these frames came before this rank was ready
    const Status status = operation->Deliver(peer, std::move(arrived), now_us, &wait);
    if (!status.ok()) {
      failures_.ReportBug(status, now_us);
      break;
    }
  }
  stashed.mapped().clear();
  set->spare_room = std::move(stashed);
}

void DataLane::ReleaseFrames(ProcessSet* set) {
  for (auto& [turn, active] : set->active) active.operation->ReleaseFrames(links_, &held_);
  for (auto& [ticket, frames] : set->stash) {
    for (auto& [peer, arrived] : frames) {
      const auto p = static_cast<size_t>(peer);
      if (arrived.held && links_[p] != nullptr) links_[p]->Release(Lane::kData, arrived.frame);
      if (arrived.held) --held_[p];
    }
  }
  set->stash.clear();
  set->copied.clear();
}

bool DataLane::Read(int peer, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  bool moved = false;
  InFrame frame;
  for (int n = 0; n < kFramesPerTurn && links_[p] != nullptr; ++n) {
    if (!links_[p]->Poll(Lane::kData, &frame)) break;
    moved = true;
    monitor_.OnFrame(peer);
    if (state_.stopped) {
      links_[p]->Release(Lane::kData, frame);
      continue;
    }
    const Status status = Receive(peer, frame, now_us);
    if (!status.ok()) failures_.ReportBug(status, now_us);
  }
  return moved;
}

// Never leaves a frame unread, whatever its set is waiting for, so that the frames behind it, which
// may be another set's, move on. Frames are held where they lie, also those that come before their
// operation: a peer that is ahead then waits. When they fill up a lane and stand still, they are
// copied out (EmptyFullLinks), and so are those that follow, until their operation moves again.
Status DataLane::Receive(int peer, const InFrame& frame, int64_t now_us) {
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
