#include "scheduler/deadlock_detector.h"

#include <utility>

#include "scheduler/deadlock.h"

namespace tfdist {

void DeadlockDetector::Tick(int64_t own_us) {
  bool waits = false;
  for (const auto& [id, set] : access_.sets) waits |= !set->entries.empty() || !set->active.empty();
  if (!waits || access_.state.stopped ||
      std::exchange(noted_moves_, access_.state.moves) != access_.state.moves) {
    still_since_us_ = own_us;
  }
  if (access_.still) access_.still(access_.state.moves, own_us - still_since_us_);
}

void DeadlockDetector::ReportBlocked(uint64_t moves, BlockedNote::How how, std::string place) {
  if (moves != access_.state.moves || access_.state.stopped || access_.state.leaving) return;
  blocked_.emplace();
  blocked_->moves = moves;
  blocked_->how = how;
  blocked_->place = std::move(place);
  SendNote(0);
}

// The operations that this rank waits for; none, if it may go on by itself.
std::vector<BlockedWait> DeadlockDetector::Waiting() const {
  std::vector<BlockedWait> waits;
  for (const auto& [id, set] : access_.sets) {
    if (set->ranks.empty()) continue;
    bool goes_on = set->joining != nullptr || set->HasJoined() || !set->allocating.empty();
    for (const auto& [number, group] : set->gated) {
      goes_on |= !group.held.empty() || !group.later.empty();
    }
    for (const auto& [key, queue] : set->entries) waits.push_back({id, set->ranks, 0, key});
    for (const auto& [turn, active] : set->active) {
      const uint64_t ticket = active.operation->ticket();
      goes_on |= !IsPredicted(ticket);  // all ranks have it
      const std::string& key = active.operation->members()[0]->info.key;
      waits.push_back({id, set->ranks, ticket, key});
    }
    if (goes_on) return {};
  }
  return waits;
}

std::vector<LedWait> DeadlockDetector::LedWaits() const {
  std::vector<LedWait> led;
  for (const auto& [id, set] : access_.sets) {
    if (set->negotiator == nullptr) continue;
    for (auto& [key, missing] : set->negotiator->Missing()) {
      led.push_back({id, key, std::move(missing)});
    }
  }
  return led;
}

// To rank 0; `round`: of its question, 0: nobody has asked.
void DeadlockDetector::SendNote(uint32_t round) {
  BlockedNote note;
  note.moves = access_.state.moves;
  if (blocked_.has_value() && blocked_->moves == access_.state.moves && !access_.state.stopped &&
      !access_.state.leaving) {
    note = *blocked_;
    note.waits = Waiting();
    note.led = LedWaits();
    for (const auto& [id, set] : access_.sets) note.took_part[id] = set->book.LastTickets();
  }
  note.round = round;
  if (note.waits.empty() && round == 0) return;
  if (access_.rank == 0) {
    OnNote(0, std::move(note));
  } else {
    access_.control->Send(0, FrameType::kBlocked, kWorldSet, EncodeBlocked(note));
  }
}

// On rank 0. What a note says was true once. So the ranks of a deadlock are asked again: if nothing
// has moved on any of them since their notes, all notes are true at the moment of the question.
void DeadlockDetector::OnNote(int rank, BlockedNote note) {
  if (access_.state.stopped || access_.state.leaving) return;
  const uint32_t round = note.round;
  const auto before = notes_.find(rank);
  const bool same = before != notes_.end() && before->second.moves == note.moves;
  if (note.waits.empty()) {
    notes_.erase(rank);
  } else {
    notes_[rank] = std::move(note);
  }
  if (round == 0) {
    if (unanswered_.empty()) Probe();
    return;
  }
  if (round != round_ || unanswered_.erase(rank) == 0) return;
  holds_ &= same && notes_.count(rank) > 0;
  if (!unanswered_.empty()) return;
  if (holds_) {
    EndDeadlock();
  } else {
    Probe();
  }
}

void DeadlockDetector::Probe() {
  const Deadlock deadlock = FindDeadlock(notes_, LedWaits());
  if (deadlock.empty()) return;
  const uint32_t round = ++round_;
  holds_ = true;
  for (const auto& [rank, others] : deadlock) unanswered_.insert(rank);
  for (const auto& [rank, others] : deadlock) {
    if (rank != 0)
      access_.control->Send(rank, FrameType::kBlockedAsk, kWorldSet, EncodeRound(round));
  }
  if (deadlock.count(0) > 0) SendNote(round);
}

void DeadlockDetector::EndDeadlock() {
  const Deadlock deadlock = FindDeadlock(notes_, LedWaits());
  if (deadlock.empty()) return;
  const std::string text =
      "Deadlock: no rank can continue. " + DeadlockText(deadlock, notes_) +
      ". All ranks must make the same collective calls in the same order. Usual causes: different "
      "numbers of batches or epochs (pass the same steps_per_epoch and epochs to fit on all ranks, "
      "or use tfdist.callbacks.UnevenData; in a custom loop, tfdist.join); fit stopped on some "
      "ranks only (put tfdist.callbacks.StopTogether last in the list of callbacks); a call that "
      "only some ranks reach, for example under `if tfdist.rank() == 0:`";
  const std::string& key = notes_.at(deadlock.begin()->first).waits[0].key;
  access_.failures->Suspect(kNoRank, true,
                            Status(Code::kFailedPrecondition, text + ".",
                                   ErrorRecord{"mismatch", -1, "", 0, key, text, ""}));
}

}  // namespace tfdist
