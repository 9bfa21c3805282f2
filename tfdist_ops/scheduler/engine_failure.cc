// How work ends otherwise than well: deadlines, failure, and ranks that leave.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/logging.h"
#include "scheduler/engine.h"
#include "scheduler/failure_status.h"

namespace tfdist {
namespace {

// After the leader's deadline the other ranks wait a little longer, so that the error they report
// is the leader's, who knows which ranks are missing.
constexpr int64_t kLeaderGraceUs = 500 * 1000;

}  // namespace

// ---- time ----

void Engine::Tick(int64_t now_us) {
  for (auto& [id, set] : sets_) {
    if (state_.stopped) break;
    TellWaits(set.get(), now_us);
    if (state_.stopped || set->negotiator == nullptr) continue;
    WarnOfStalls(set.get(), now_us);
    EndMismatched(set.get(), now_us);
    if (!state_.stopped) EndExpired(set.get(), now_us);
  }
  if (!state_.stopped) EndLate(now_us);
  deadlocks_.Tick(now_us);
  failures_.Tick(now_us);
  if (!state_.leaving) recorder_.AskForTime(now_us);
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
    control_.SendToMembers(*set, FrameType::kStall, EncodeStall(stall.key, stall.text));
  }
}

void Engine::EndExpired(ProcessSet* set, int64_t now_us) {
  std::optional<Stall> expired = set->negotiator->Expired(now_us);
  if (!expired) expired = set->waits->Expired(now_us);
  if (!expired) expired = set->joins->Expired(now_us);
  if (!expired) expired = gate_.ExpiredStep(*set, now_us, now_us);
  if (!expired) return;
  ErrorRecord record{"timeout", -1, "", 0, expired->key, "deadline passed", expired->text};
  std::string message = expired->text;
  if (!expired->missing.empty()) {  // else this rank's own program has not called it
    record.rank = expired->missing[0];
    record.host = HostOf(world_, record.rank);
    message +=
        ", which is its timeout. What is missing is alive but did not call it: look for a step "
        "that only some ranks take, or raise TFDIST_TIMEOUT_S.";
  }
  failures_.Suspect(kNoRank, true, Status(Code::kDeadlineExceeded, message, record));
}

void Engine::EndLate(int64_t now_us) {
  const int64_t limit = now_us - kLeaderGraceUs;
  const Request* late = nullptr;
  const ProcessSet* of = nullptr;
  pending_.ForEachInSets([&](const ProcessSet& set, const Request& request) {
    if (request.deadline_us >= limit || StepGate::Holds(set, request)) return;
    late = &request;
    of = &set;
  });
  for (const auto& [id, set] : sets_) {
    const std::optional<Stall> step = gate_.ExpiredStep(*set, limit, now_us);
    if (!step) continue;
    failures_.Suspect(
        kNoRank, true,
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
          : name + of->Text() + " got no answer from the leader, " +
                DescribeRank(world_, of->leader());
  const Status status(Code::kDeadlineExceeded, text + "; its timeout has passed.",
                      ErrorRecord{"timeout", -1, "", 0, info.key, "deadline passed", text});
  failures_.Suspect(kNoRank, true, status);
}

// ---- failure ----

// Nothing runs any more, and nothing ends before the ranks have agreed why. What the gate holds
// stays where it is: the verdict says whether it counts.
void Engine::StopWork() {
  if (state_.stopped) return;
  state_.stopped = true;
  for (auto& [id, set] : sets_) {
    data_lane_.ReleaseFrames(set.get());
    pending_.StopAllOf(set.get());
  }
}

// A request that was on its way when the work stopped.
void Engine::EndStopped(std::unique_ptr<Request> request) {
  if (state_.failure.ok()) {
    pending_.Stop(std::move(request));
  } else {
    Finish(std::move(request), state_.failure);
  }
}

// The end of all work: with `failure` for what is submitted from now on, `pending` for the rest.
void Engine::EndAll(const Status& failure, const Status& pending, int64_t now_us) {
  state_.failure = failure;
  const Status torn = gate_.Resolve(agreement(), now_us);
  if (!torn.ok()) state_.failure = torn;
  const Status& rest = torn.ok() ? pending : torn;
  TFDIST_LOG(kInfo, world_.rank, "ENGINE", "work ends: " << rest.message());
  if (hooks_.failed) hooks_.failed(state_.failure);
  gate_.TakeHeld(&pending_);
  auto ended = pending_.TakeStopped();
  for (auto& request : ended) Finish(std::move(request), rest);
}

void Engine::AbortWith(const AbortReason& reason, int64_t now_us) {
  const bool other = reason.culprit >= 0 && reason.culprit < world_.size;
  const int culprit = other ? reason.culprit : world_.rank;
  const Status theirs = failures_.FailureOf(culprit, reason.cause, reason.detail);
  failures_.Withdraw(theirs, theirs, now_us);
}

void Engine::Cancel(uint64_t id, int64_t now_us) {
  const Request* found = pending_.Find(id);
  if (found == nullptr) return;
  const std::string key = found->info.key;
  const std::string cause = "its own step failed or was cancelled, and left \"" + key + "\"";
  const Status mine(Code::kCancelled, "\"" + key + "\" was cancelled: this rank's step failed",
                    ErrorRecord{"cancelled", world_.rank, "", 0, key, cause, ""});
  failures_.Withdraw(mine, failures_.FailureOf(world_.rank, cause, ""), now_us);
}

void Engine::LosePeer(int peer, const Status& reason, int64_t now_us) {
  if (!departures_.HasLeft(peer) && !state_.leaving && state_.failure.ok()) {
    failures_.OnConnectionLost(peer, reason, now_us);
  }
  // A peer that left had done its part; what it sent has been read before the link's end. What is
  // still held here, because a third rank is slow or this one is not as far, would go with it.
  data_lane_.CopyFrames(peer);
  departures_.OnLost(peer);
  control_.DiscardQueue(peer);
  failures_.SettleVerdict(peer);
  links_[static_cast<size_t>(peer)].reset();
  monitor_.Forget(peer);
}

// ---- leaving ----

void Engine::Stop(int64_t now_us) {
  state_.leaving = true;
  const Status status = failures_.FailureOf(world_.rank, "tfdist was shut down on this rank", "");
  failures_.Withdraw(status, status, now_us);
}

void Engine::Leave(int64_t now_us) {
  if (state_.leaving) return;
  const bool gives_up = state_.failure.ok() && busy();
  state_.leaving = true;
  if (gives_up)
    failures_.Withdraw(ShutDownStatus(world_, pending_.OldestKey()),
                       failures_.FailureOf(
                           world_.rank, ShutDownStatus(world_, pending_.OldestKey()).message(), ""),
                       now_us);
  departures_.SayGoodbye();
}

bool Engine::Left() const { return state_.leaving && departures_.IsGoodbyeHeard(); }

}  // namespace tfdist
