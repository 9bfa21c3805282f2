// How work ends otherwise than well: deadlines, failure, and ranks that leave.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/logging.h"
#include "scheduler/engine.h"

namespace tfdist {
namespace {

// After the leader's deadline the other ranks wait a little longer, so that the error they report
// is the leader's, who knows which ranks are missing.
constexpr int64_t kLeaderGraceUs = 500 * 1000;

// Whether the gate holds it: its own work is done.
bool Held(const ProcessSet& set, const Request& request) {
  for (const auto& [number, group] : set.gated) {
    for (const auto& held : group.held) {
      if (held.get() == &request) return true;
    }
  }
  return false;
}

}  // namespace

// ---- time ----

void Engine::Tick(int64_t now_us) {
  for (auto& [id, set] : sets_) {
    if (stopped_) break;
    TellWaits(set.get(), now_us);
    if (stopped_ || set->negotiator == nullptr) continue;
    WarnOfStalls(set.get(), now_us);
    EndMismatched(set.get(), now_us);
    if (!stopped_) EndExpired(set.get(), now_us);
  }
  if (!stopped_) EndLate(now_us);
  NoteStill(now_us);
  TickMembership(now_us);
  AskForTime(now_us);
}

void Engine::WarnOfStalls(ProcessSet* set, int64_t now_us) {
  const auto warning_us = static_cast<int64_t>(config_.stall_warning_s * 1e6);
  std::vector<Stall> stalls = set->negotiator->TakeStalls(now_us, warning_us);
  for (Stall& stall : set->waits->TakeStalls(now_us, warning_us)) {
    stalls.push_back(std::move(stall));
  }
  for (Stall& stall : set->joins->TakeStalls(now_us, warning_us)) {
    stalls.push_back(std::move(stall));
  }
  for (const Stall& stall : stalls) {
    TFDIST_LOG(kWarning, world_.rank, "STALL",
               stall.text << (stall.kind == CollectiveKind::kJoin
                                  ? ", which has called nothing meanwhile."
                                  : ", which has not called it yet. Check that all ranks take the "
                                    "same steps, and equally many.")
                          << " The wait ends after its timeout.");
    set->stalls[stall.key] = stall.text;
    TellMembers(*set, FrameType::kStall, EncodeStall(stall.key, stall.text));
  }
}

void Engine::EndExpired(ProcessSet* set, int64_t now_us) {
  std::optional<Stall> expired = set->negotiator->Expired(now_us);
  if (!expired) expired = set->waits->Expired(now_us);
  if (!expired) expired = set->joins->Expired(now_us);
  if (!expired) expired = ExpiredStep(*set, now_us, now_us);
  if (!expired) return;
  ErrorRecord record{"timeout", -1, "", 0, expired->key, "deadline passed", expired->text};
  std::string message = expired->text;
  if (!expired->missing.empty()) {  // else this rank's own program has not called it
    record.rank = expired->missing[0];
    record.host = world_.hosts[static_cast<size_t>(record.rank)];
    message +=
        ", which is its timeout. What is missing is alive but did not call it: look for a step "
        "that only some ranks take, or raise TFDIST_TIMEOUT_S.";
  }
  Suspect(kNoRank, true, Status(Code::kDeadlineExceeded, message, record));
}

void Engine::EndLate(int64_t now_us) {
  const int64_t limit = now_us - kLeaderGraceUs;
  const Request* late = nullptr;
  const ProcessSet* of = nullptr;
  ForEachRequest([&](const ProcessSet& set, const Request& request) {
    if (request.deadline_us >= limit || Held(set, request)) return;
    late = &request;
    of = &set;
  });
  for (const auto& [id, set] : sets_) {
    const std::optional<Stall> step = ExpiredStep(*set, limit, now_us);
    if (!step) continue;
    Suspect(kNoRank, true,
            Status(Code::kDeadlineExceeded, step->text + "; its timeout has passed.",
                   ErrorRecord{"timeout", -1, "", 0, step->key, "deadline passed", step->text}));
    return;
  }
  if (late == nullptr) return;
  const RequestInfo& info = late->info;
  const auto told = of->stalls.find(info.key);
  const std::string name = std::string(CollectiveKindName(info.kind)) + " \"" + info.key + "\"";
  const std::string text =
      told != of->stalls.end() ? told->second
      : late->agreed_us > 0
          ? name + of->Text() + " did not finish although every rank had started it"
          : name + of->Text() + " got no answer from the leader, " + Describe(of->leader());
  const Status status(Code::kDeadlineExceeded, text + "; its timeout has passed.",
                      ErrorRecord{"timeout", -1, "", 0, info.key, "deadline passed", text});
  Suspect(kNoRank, true, status);
}

void Engine::ForEachRequest(
    const std::function<void(const ProcessSet&, const Request&)>& visit) const {
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

// ---- failure ----

std::string Engine::Describe(int rank) const {
  const auto r = static_cast<size_t>(rank);
  std::string text = "rank " + std::to_string(rank);
  if (r < world_.hosts.size() && !world_.hosts[r].empty()) {
    text += " (host " + world_.hosts[r];
    if (r < world_.pids.size() && world_.pids[r] > 0) {
      text += ", pid " + std::to_string(world_.pids[r]);
    }
    text += ")";
  }
  return text;
}

std::string Engine::OldestKey() const {
  const Request* oldest = nullptr;
  const auto look = [&](const Request& request) {
    if (oldest == nullptr || request.submitted_us < oldest->submitted_us) oldest = &request;
  };
  ForEachRequest([&](const ProcessSet&, const Request& request) { look(request); });
  for (const auto& request : stopped_requests_) look(*request);
  return oldest == nullptr ? "" : oldest->info.key;
}

Status Engine::FailureOf(int rank, const std::string& cause, const std::string& detail) const {
  const auto r = static_cast<size_t>(rank);
  ErrorRecord record{"rank_failed",
                     rank,
                     r < world_.hosts.size() ? world_.hosts[r] : "",
                     r < world_.pids.size() ? world_.pids[r] : 0,
                     OldestKey(),
                     cause,
                     detail};
  std::string message = Describe(rank) + " failed";
  if (!record.tensor.empty()) message += " while \"" + record.tensor + "\" was in progress";
  return Status(Code::kAborted, message + ": " + cause, record);
}

void Engine::Withdraw(const Status& mine, const Status& theirs, int64_t now_us) {
  CheckOutcome(now_us);
  if (!failure_.ok()) return;
  StopWork();
  agreement_.Withdraw(theirs.message(), EncodeRecord(theirs));
  if (!leaving_) {  // a goodbye says it all
    TellMembership();
    FlushMembership();
  }
  // A cancelled step is over; what is submitted later fails because this rank has left the others.
  EndAll(mine.code() == Code::kCancelled ? theirs : mine, mine, now_us);
}

// Nothing runs any more, and nothing ends before the ranks have agreed why. What the gate holds
// stays where it is: the verdict says whether it counts.
void Engine::StopWork() {
  if (stopped_) return;
  stopped_ = true;
  for (auto& [id, set] : sets_) {
    for (auto& [turn, active] : set->active) {
      active.operation->ReleaseFrames(links_, &held_);
      for (auto& member : active.operation->members()) {
        if (member != nullptr) stopped_requests_.push_back(std::move(member));
      }
    }
    for (auto& [ticket, request] : set->allocating) stopped_requests_.push_back(std::move(request));
    for (auto& [key, queue] : set->entries) {
      for (auto& request : queue) stopped_requests_.push_back(std::move(request));
    }
    for (auto& [number, group] : set->gated) {
      for (auto& request : group.later) stopped_requests_.push_back(std::move(request));
      group.later.clear();
    }
    if (set->joining != nullptr) stopped_requests_.push_back(std::move(set->joining));
    set->active.clear();
    set->allocating.clear();
    set->entries.clear();
    for (auto& [ticket, frames] : set->stash) {
      for (auto& [peer, arrived] : frames) {
        const auto p = static_cast<size_t>(peer);
        if (arrived.held && links_[p] != nullptr) links_[p]->Release(Lane::kData, arrived.frame);
        if (arrived.held) --held_[p];
      }
    }
    set->stash.clear();
    set->copied.clear();
    set->early.clear();
  }
}

// A request that was on its way when the work stopped.
void Engine::EndRequest(std::unique_ptr<Request> request) {
  if (failure_.ok()) {
    stopped_requests_.push_back(std::move(request));
  } else {
    Finish(std::move(request), failure_);
  }
}

// The end of all work: with `failure` for what is submitted from now on, `pending` for the rest.
void Engine::EndAll(const Status& failure, const Status& pending, int64_t now_us) {
  failure_ = failure;
  const Status torn = ResolveGates(now_us);
  if (!torn.ok()) failure_ = torn;
  const Status& rest = torn.ok() ? pending : torn;
  TFDIST_LOG(kInfo, world_.rank, "ENGINE", "work ends: " << rest.message());
  if (hooks_.failed) hooks_.failed(failure_);
  for (auto& [id, set] : sets_) {
    for (auto& [number, group] : set->gated) {
      for (auto& request : group.held) stopped_requests_.push_back(std::move(request));
      group.held.clear();
    }
  }
  auto ended = std::exchange(stopped_requests_, {});
  for (auto& request : ended) Finish(std::move(request), rest);
}

void Engine::AbortWith(const AbortReason& reason, int64_t now_us) {
  const bool other = reason.culprit >= 0 && reason.culprit < world_.size;
  const int culprit = other ? reason.culprit : world_.rank;
  const Status theirs = FailureOf(culprit, reason.cause, reason.detail);
  Withdraw(theirs, theirs, now_us);
}

void Engine::Cancel(uint64_t id, int64_t now_us) {
  const Request* found = nullptr;
  ForEachRequest([&](const ProcessSet&, const Request& request) {
    if (request.id == id) found = &request;
  });
  for (const auto& request : stopped_requests_) {
    if (request->id == id) found = request.get();
  }
  if (found == nullptr) return;
  const std::string key = found->info.key;
  const std::string cause = "its own step failed or was cancelled, and left \"" + key + "\"";
  const Status mine(Code::kCancelled, "\"" + key + "\" was cancelled: this rank's step failed",
                    ErrorRecord{"cancelled", world_.rank, "", 0, key, cause, ""});
  Withdraw(mine, FailureOf(world_.rank, cause, ""), now_us);
}

void Engine::LosePeer(int peer, const Status& reason, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  if (!inbound_[p].left && !leaving_) {
    if (failure_.ok()) {
      const std::string transport = links_[p]->transport();
      lost_[peer] = {now_us, inbound_[p].ended || transport == "shm" || transport == "inproc",
                     false, reason};
      StopWork();  // hands back all frames: they point into memory that goes away with the link
    }
  }
  // A peer that left had done its part; what it sent has been read before the link's end. What is
  // still held here, because a third rank is slow or this one is not as far, would go with it.
  CopyFrames(peer);
  inbound_[p].left = true;
  inbound_[p].acknowledged = true;
  outbound_[p] = Outbound{};
  barred_ |= !links_[p]->ClaimVerdict();  // from now on the peer cannot
  links_[p].reset();
  monitor_.Forget(peer);
}

void Engine::HandleLeave(int peer) {
  const std::string key = OldestKey();
  uint32_t steps = 0;
  for (const auto& [set, tickets] : inbound_[static_cast<size_t>(peer)].took_part) {
    for (uint64_t ticket : tickets) {
      if (TicketGroup(ticket) != kRepeatedGroup) steps = std::max(steps, TicketSequence(ticket));
    }
  }
  ErrorRecord record{"shutdown",
                     peer,
                     world_.hosts[static_cast<size_t>(peer)],
                     world_.pids[static_cast<size_t>(peer)],
                     key,
                     "it has shut down",
                     ""};
  const Status status(Code::kAborted,
                      Describe(peer) + " has shut down (called tfdist.shutdown() or ended)" +
                          (steps > 0 ? " after " + std::to_string(steps) + " training steps" : "") +
                          (key.empty() ? "" : " and will not take part in \"" + key + "\"") +
                          ". Every rank must make the same calls: check that all have the same "
                          "number of steps.",
                      record);
  Suspect(peer, true, status);
}

void Engine::RefuseMissing() {
  for (const auto& [id, set] : sets_) {
    if (set->negotiator == nullptr || stopped_) continue;
    for (int32_t rank : set->ranks) {
      if (!inbound_[static_cast<size_t>(rank)].left) continue;
      const bool joins_wait = !set->joins->empty() && !set->joins->Has(rank);
      if (!joins_wait && !set->negotiator->WaitsFor(rank)) continue;
      HandleLeave(rank);
      return;
    }
  }
}

// ---- leaving ----

void Engine::AcknowledgeLeaves() {
  for (size_t p = 0; p < inbound_.size(); ++p) {
    if (!inbound_[p].answer_due) continue;
    const int peer = static_cast<int>(p);
    const bool needed = std::any_of(sets_.begin(), sets_.end(), [peer](const auto& item) {
      const ProcessSet& set = *item.second;
      return set.IndexOf(peer) >= 0 && !(set.active.empty() && set.allocating.empty());
    });
    if (needed) continue;
    inbound_[p].answer_due = false;
    // Only the end of a connection can take unread bytes with it.
    if (links_[p] == nullptr || !links_[p]->Direct()) continue;
    Tell(peer, FrameType::kLeaveAck, kWorldSet, "");
  }
}

Status Engine::ShutDown() const {
  return Status(Code::kAborted, "tfdist was shut down on this rank",
                ErrorRecord{"shutdown", world_.rank, "", 0, OldestKey(), "shut down", ""});
}

void Engine::Stop(int64_t now_us) {
  leaving_ = true;
  const Status status = FailureOf(world_.rank, "tfdist was shut down on this rank", "");
  Withdraw(status, status, now_us);
}

void Engine::Leave(int64_t now_us) {
  if (leaving_) return;
  const bool gives_up = failure_.ok() && busy();
  leaving_ = true;
  if (gives_up) Withdraw(ShutDown(), FailureOf(world_.rank, ShutDown().message(), ""), now_us);
  LeaveNote note;
  for (const auto& [id, set] : sets_) note[id] = set->book.LastTickets();
  TellAll(FrameType::kLeave, EncodeLeave(note));
}

bool Engine::Left() const {
  if (!leaving_) return false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr) continue;
    if (!outbound_[p].messages.empty() || !links_[p]->Flushed()) return false;
    if (links_[p]->Direct() && !inbound_[p].acknowledged) return false;
  }
  return true;
}

}  // namespace tfdist
