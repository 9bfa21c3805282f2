// Who is alive, and one verdict about a failure: the engine's side of membership/. It turns what it
// sees into evidence, carries the messages, and raises when there is an outcome.
#include <algorithm>
#include <utility>

#include "scheduler/engine.h"

namespace tfdist {
namespace {

// The end of a connection comes a moment before the end of the process can be seen. After this long
// a process that still runs has lost its connection only.
constexpr int64_t kDoubtUs = 300 * 1000;
constexpr char kHasLeft[] = "it has shut down";  // no failure
constexpr size_t kMostOthers = 3;                // in a message

// A JSON object with one more field.
std::string WithField(const std::string& object, const std::string& name, int64_t value) {
  if (object.empty() || object.back() != '}') return object;
  return object.substr(0, object.size() - 1) + ", \"" + name + "\": " + std::to_string(value) + "}";
}

// The other failures of a verdict, for the end of its message.
std::string Others(const Verdict& verdict) {
  std::string text;
  size_t count = 0;
  for (const Evidence& other : verdict.others) {
    if (other.cause == kHasLeft || ++count > kMostOthers) continue;
    text += "; also: " + other.cause;
  }
  return count > kMostOthers ? text + "; and " + std::to_string(count - kMostOthers) + " more"
                             : text;
}

}  // namespace

bool Engine::doubting() const {
  return std::any_of(lost_.begin(), lost_.end(),
                     [](const auto& item) { return !item.second.suspected; });
}

ProcessState Engine::LookAt(int peer) const {
  return hooks_.process_state ? hooks_.process_state(peer) : ProcessState::kUnknown;
}

// ---- evidence ----

Status Engine::RankFailed(int rank, const std::string& cause, const std::string& detail) const {
  ErrorRecord record{
      "rank_failed", rank,  HostOf(world_, rank), PidOf(world_, rank), pending_.OldestKey(),
      cause,         detail};
  std::string message = DescribeRank(world_, rank) + " failed: " + cause;
  if (!record.tensor.empty()) message += " while \"" + record.tensor + "\" was in progress";
  if (!detail.empty()) message += " (" + detail + ")";
  return Status(Code::kAborted, message, record);
}

void Engine::Suspect(int rank, bool certain, const Status& status) {
  if (!state_.failure.ok() || state_.leaving) return;
  seen_.push_back({rank, certain, status.message().substr(0, kMaxCause), EncodeRecord(status)});
  StopWork();
}

// A process that was stopped may go on later. Where it can be barred from deciding, it is as
// certainly out as one that is gone.
bool Engine::BarIfStopped(int peer) {
  const auto& link = links_[static_cast<size_t>(peer)];
  return link != nullptr && LookAt(peer) == ProcessState::kStopped && link->BarPeer();
}

bool Engine::ClaimVerdict() {
  for (const auto& link : links_) {
    if (link != nullptr) barred_ |= !link->ClaimVerdict();
  }
  return !barred_;
}

// A process that was killed leaves its connections a moment before it is seen to be gone.
void Engine::ClassifyLostPeers(int64_t now_us) {
  for (auto it = lost_.begin(); it != lost_.end();) {
    auto& [peer, lost] = *it;
    const ProcessState state = LookAt(peer);
    const bool certain =
        state == ProcessState::kGone || (state == ProcessState::kUnknown && lost.local);
    const bool wait = state != ProcessState::kUnknown && now_us - lost.since_us < kDoubtUs;
    if (certain) {
      Suspect(peer, true,
              RankFailed(peer, "its process ended or was killed", lost.reason.message()));
      it = lost_.erase(it);
      continue;
    }
    if (!wait && !lost.suspected) {
      lost.suspected = true;
      Suspect(peer, false,
              RankFailed(peer,
                         state == ProcessState::kUnknown
                             ? "its process ended or was killed, or the connection to it was cut"
                             : "the connection to it ended, although its process is there",
                         lost.reason.message()));
    }
    ++it;
  }
}

void Engine::TickMembership(int64_t now_us) {
  if (!state_.leaving) {
    for (int peer : monitor_.WantProcessState()) monitor_.SetProcessState(peer, LookAt(peer));
    HeartbeatMonitor::Turn turn = monitor_.Tick(now_us);
    for (const auto& [peer, beat] : turn.beats) {
      control_.Send(peer, FrameType::kBeat, kWorldSet, EncodeBeat(beat));
    }
    for (const Evidence& evidence : turn.evidence) {
      Suspect(evidence.rank, evidence.certain || BarIfStopped(evidence.rank),
              evidence.certain
                  ? RankFailed(evidence.rank, "its process ended or was killed", evidence.cause)
                  : RankFailed(evidence.rank, evidence.cause, ""));
    }
  }
  TurnMembership(now_us);
  agreement_.Tick(now_us);
  TurnMembership(now_us);
}

// A rank that has said goodbye acts no more: an agreement must not wait for it. Told after what
// began the agreement, so that nobody takes it for the culprit.
void Engine::CountOutLeavers() {
  std::vector<Evidence> leavers;
  for (int peer : departures_.TakeGoodbyes()) leavers.push_back({peer, true, kHasLeft, ""});
  if (!leavers.empty()) agreement_.AddEvidence(leavers);
}

// ---- one turn ----

void Engine::TurnMembership(int64_t now_us) {
  ClassifyLostPeers(now_us);
  if (!seen_.empty()) agreement_.AddEvidence(std::exchange(seen_, {}));
  if (agreement_.active() && agreement_.outcome() == Outcome::kNone && !state_.leaving) {
    monitor_.WatchAll();
    CountOutLeavers();
  }
  TellMembership();
  CheckOutcome(now_us);
}

void Engine::TellMembership() {
  gate_.SendMessages();
  const AgreementMessage* last = nullptr;
  std::string bytes;
  for (const auto& [peer, message] : agreement_.TakeMessages()) {
    if (message.get() != last) bytes = EncodeAgreement(*message);
    last = message.get();
    control_.Send(peer, FrameType::kAgreement, kWorldSet, bytes);
  }
}

// Before an operation ends with an error: a program that ends at once must not take the word with
// it, and look to the others like one more death.
void Engine::FlushMembership() {
  bool moved = false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr) continue;
    control_.Flush(static_cast<int>(p));
    static_cast<void>(links_[p]->Pump(&moved).ok());  // an error is final: Poll meets it again
  }
}

// Called by the agreement when it learns of the first evidence.
std::vector<CommitPoint> Engine::Freeze() {
  StopWork();
  return gate_.Freeze();
}

// ---- the outcome ----

void Engine::CheckOutcome(int64_t now_us) {
  if (!state_.failure.ok() || state_.leaving || agreement_.outcome() == Outcome::kNone) return;
  FlushMembership();
  const Status status = OutcomeStatus();
  EndAll(status, status, now_us);
}

// What the first who saw it said; built from the evidence alone, equal wherever that is equal.
Status Engine::VerdictStatus(const Evidence& culprit) const {
  Status status;
  if (DecodeStatus(AsBytes(culprit.record), &status) && !status.ok()) return status;
  if (culprit.rank == kNoRank) return Status(Code::kAborted, culprit.cause);
  const ErrorRecord record{"rank_failed",
                           culprit.rank,
                           HostOf(world_, culprit.rank),
                           PidOf(world_, culprit.rank),
                           "",
                           culprit.cause,
                           ""};
  return Status(Code::kAborted, DescribeRank(world_, culprit.rank) + " failed: " + culprit.cause,
                record);
}

Status Engine::OutcomeStatus() const {
  if (agreement_.outcome() == Outcome::kDecided) {
    const Verdict& verdict = agreement_.verdict();
    Status status = VerdictStatus(verdict.culprit);
    status = Status(status.code(), status.message() + Others(verdict), status.payload());
    // With one group, a step that counts is applied by every survivor and no later one by any.
    if (config_.atomic_steps == 0 || verdict.commits.size() > 1) return status;
    const int64_t step = verdict.commits.empty() ? 0 : verdict.commits[0].step;
    return Status(status.code(), status.message(),
                  WithField(status.payload(), "committed_step", step));
  }
  const std::vector<Evidence> seen = agreement_.Seen();
  const Status first = seen.empty() ? Status(Code::kAborted, "nothing was seen to fail")
                                    : VerdictStatus(seen.front());
  ErrorRecord record{"evicted", world_.rank, "", 0, pending_.OldestKey(), agreement_.own_cause(),
                     ""};
  if (agreement_.outcome() == Outcome::kEvicted) {
    record.host = HostOf(world_, world_.rank);
    record.pid = PidOf(world_, world_.rank);
    return Status(Code::kAborted,
                  DescribeRank(world_, world_.rank) +
                      " was taken out of the job by the other ranks, which go on without it: " +
                      agreement_.own_cause() +
                      ". It must not use its results any more: end it and start again.",
                  record);
  }
  if (agreement_.outcome() == Outcome::kNoMajority) {
    record.kind = "no_majority";
    record.rank = seen.empty() ? -1 : seen.front().rank;
    record.host = HostOf(world_, record.rank);
    record.pid = PidOf(world_, record.rank);
    record.cause = first.message();
    record.detail = agreement_.own_cause();
    return Status(Code::kAborted,
                  first.message() + "; no majority: " + agreement_.own_cause() +
                      ", and the others may live and go on without it. This rank has to end.",
                  record);
  }
  return Status(first.code(), first.message() + "; " + agreement_.own_cause(), first.payload());
}

}  // namespace tfdist
