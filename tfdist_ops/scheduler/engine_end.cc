// The ends of an engine's work: failure, cancellation, and leaving.
#include <utility>

#include "base/logging.h"
#include "scheduler/engine.h"
#include "scheduler/failure_status.h"

namespace tfdist {

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
  const Status torn = gate_.Resolve(consensus(), now_us);
  if (!torn.ok()) state_.failure = torn;
  const Status& rest = torn.ok() ? pending : torn;
  TFDIST_LOG(kInfo, world_.rank, "ENGINE", "work ends: " << rest.message());
  if (hooks_.failed) hooks_.failed(state_.failure);
  gate_.TakeHeld(&pending_);
  auto ended = pending_.TakeStopped();
  for (auto& request : ended) Finish(std::move(request), rest);
}

// Whether a request that ends with `status` ends well after all. Only if the end of work has ended
// it: one that was cancelled, or that the ranks did not agree on, has a code of its own. A request
// without an id is not of this rank's program: the rank has joined, and takes part in it.
bool Engine::HidesFailure(const Request& request, const Status& status) const {
  const bool is_failure =
      !state_.failure.ok() && status.code() == state_.failure.code() && !state_.leaving;
  return is_failure && request.id != 0 && hooks_.hide_failure &&
         hooks_.hide_failure(request, state_.failure);
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
  const std::string cause = "its own step failed or was cancelled during \"" + key + "\"";
  const Status mine(Code::kCancelled, "\"" + key + "\" was cancelled: this rank's step failed",
                    ErrorRecord{"cancelled", world_.rank, "", 0, key, cause, ""});
  failures_.Withdraw(mine, failures_.FailureOf(world_.rank, cause, ""), now_us);
}

void Engine::LosePeer(int peer, const Status& reason, int64_t now_us) {
  if (!departures_.HasLeft(peer) && !state_.leaving && state_.failure.ok()) {
    failures_.OnConnectionLost(peer, reason, now_us);
  }
  // A peer that left had done its part, and what came of it was read before its link ended (if not
  // all of it came: Departures::CheckArrived). Frames of it that are still held here, because a
  // third rank is slow or this one lags behind, would be lost with the link.
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
  if (gives_up) {
    const Status mine = ShutDownStatus(world_, pending_.OldestKey());
    failures_.Withdraw(mine, failures_.FailureOf(world_.rank, mine.message(), ""), now_us);
  }
  departures_.SayGoodbye();
}

bool Engine::Left() const { return state_.leaving && departures_.IsGoodbyeHeard(); }

}  // namespace tfdist
