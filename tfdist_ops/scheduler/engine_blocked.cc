// Ranks that wait for each other: what this rank says of itself, and rank 0's decision. The rule is
// in blocked.h.
#include <utility>

#include "scheduler/blocked.h"
#include "scheduler/engine.h"

namespace tfdist {

void Engine::NoteStill(int64_t now_us) {
  bool waits = false;
  for (const auto& [id, set] : sets_) waits |= !set->entries.empty() || !set->active.empty();
  if (!waits || state_.stopped || std::exchange(noted_moves_, state_.moves) != state_.moves) {
    still_since_us_ = now_us;
  }
  if (hooks_.still) hooks_.still(state_.moves, now_us - still_since_us_);
}

void Engine::ReportBlocked(uint64_t moves, BlockedNote::How how, std::string place,
                           int64_t now_us) {
  if (moves != state_.moves || state_.stopped || state_.leaving) return;
  blocked_.emplace();
  blocked_->moves = moves;
  blocked_->how = how;
  blocked_->place = std::move(place);
  TellBlocked(0, now_us);
}

// The operations that this rank waits for; none, if it may go on by itself.
std::vector<BlockedWait> Engine::Waiting() const {
  std::vector<BlockedWait> waits;
  for (const auto& [id, set] : sets_) {
    if (set->ranks.empty()) continue;
    bool goes_on = set->joining != nullptr || HasJoined(*set) || !set->allocating.empty();
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

std::vector<LedWait> Engine::LedWaits() const {
  std::vector<LedWait> led;
  for (const auto& [id, set] : sets_) {
    if (set->negotiator == nullptr) continue;
    for (auto& [key, missing] : set->negotiator->Missing()) {
      led.push_back({id, key, std::move(missing)});
    }
  }
  return led;
}

// To rank 0; `round`: of its question, 0: nobody has asked.
void Engine::TellBlocked(uint32_t round, int64_t now_us) {
  BlockedNote note;
  note.moves = state_.moves;
  if (blocked_.has_value() && blocked_->moves == state_.moves && !state_.stopped &&
      !state_.leaving) {
    note = *blocked_;
    note.waits = Waiting();
    note.led = LedWaits();
    for (const auto& [id, set] : sets_) note.took_part[id] = set->book.LastTickets();
  }
  note.round = round;
  if (note.waits.empty() && round == 0) return;
  if (world_.rank == 0) {
    HearBlocked(0, std::move(note), now_us);
  } else {
    control_.Send(0, FrameType::kBlocked, kWorldSet, EncodeBlocked(note));
  }
}

// On rank 0. What a note says was true once. So the ranks of a knot are asked again: if nothing has
// moved on any of them since their notes, all notes are true at the moment of the question.
void Engine::HearBlocked(int rank, BlockedNote note, int64_t now_us) {
  if (state_.stopped || state_.leaving) return;
  const uint32_t round = note.round;
  const auto before = blocked_notes_.find(rank);
  const bool same = before != blocked_notes_.end() && before->second.moves == note.moves;
  if (note.waits.empty()) {
    blocked_notes_.erase(rank);
  } else {
    blocked_notes_[rank] = std::move(note);
  }
  if (round == 0) {
    if (unanswered_.empty()) AskKnot(now_us);
    return;
  }
  if (round != knot_round_ || unanswered_.erase(rank) == 0) return;
  knot_holds_ &= same && blocked_notes_.count(rank) > 0;
  if (!unanswered_.empty()) return;
  if (knot_holds_) {
    EndKnot();
  } else {
    AskKnot(now_us);
  }
}

void Engine::AskKnot(int64_t now_us) {
  const Knot knot = FindKnot(blocked_notes_, LedWaits());
  if (knot.empty()) return;
  const uint32_t round = ++knot_round_;
  knot_holds_ = true;
  for (const auto& [rank, others] : knot) unanswered_.insert(rank);
  for (const auto& [rank, others] : knot) {
    if (rank != 0) control_.Send(rank, FrameType::kBlockedAsk, kWorldSet, EncodeRound(round));
  }
  if (knot.count(0) > 0) TellBlocked(round, now_us);
}

void Engine::EndKnot() {
  const Knot knot = FindKnot(blocked_notes_, LedWaits());
  if (knot.empty()) return;
  const std::string text =
      "Deadlock: no rank can continue. " + KnotText(knot, blocked_notes_) +
      ". All ranks must make the same collective calls in the same order. Usual causes: different "
      "numbers of batches or epochs (pass the same steps_per_epoch and epochs to fit on all ranks, "
      "or use tfdist.callbacks.UnevenData; in a custom loop, tfdist.join); fit stopped on some "
      "ranks only (put tfdist.callbacks.StopTogether last in the list of callbacks); a call that "
      "only some ranks reach, for example under `if tfdist.rank() == 0:`";
  const std::string& key = blocked_notes_.at(knot.begin()->first).waits[0].key;
  Suspect(kNoRank, true,
          Status(Code::kFailedPrecondition, text + ".",
                 ErrorRecord{"mismatch", -1, "", 0, key, text, ""}));
}

}  // namespace tfdist
