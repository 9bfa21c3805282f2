#include "scheduler/failure_handler.h"

#include <algorithm>
#include <utility>

#include "scheduler/failure_status.h"
#include "scheduler/wire.h"

namespace tfdist {
namespace {

// The end of a connection comes a moment before the end of the process can be seen. After this long
// a process that still runs has lost its connection only.
constexpr int64_t kDoubtUs = 300 * 1000;

ConsensusOptions ConsensusTimes(const Config& config) {
  ConsensusOptions options;
  options.period_us = static_cast<int64_t>(config.heartbeat_s * 1e6);
  options.no_majority_us = 5 * options.period_us;
  options.bound_us = std::max(options.bound_us, 10 * options.no_majority_us);
  return options;
}

}  // namespace

HeartbeatMonitor MakeHeartbeatMonitor(const World& world, const Config& config,
                                      const ProcessStateOf& process_state) {
  HeartbeatOptions options;
  options.period_us = static_cast<int64_t>(config.heartbeat_s * 1e6);
  options.silence_us = static_cast<int64_t>(config.peer_timeout_s * 1e6);
  options.stopped_us = options.silence_us / 2;
  options.yield_us = 3 * options.period_us;
  options.gather_us = 5 * options.period_us;
  options.look_us = 3 * options.period_us;
  const std::vector<int> members = AllRanks(world.size);
  std::vector<bool> visible;
  for (int peer : members) {
    visible.push_back(peer != world.rank && process_state &&
                      process_state(peer) != ProcessState::kUnknown);
  }
  return HeartbeatMonitor(world.rank, members, visible, options);
}

FailureHandler::FailureHandler(const Access& access)
    : access_(access),
      process_ended_(access.links.size(), false),
      consensus_(
          access.world.rank, AllRanks(access.world.size), access.world.generation,
          [this] { return Freeze(); }, ConsensusTimes(access.config),
          [this] { return ClaimVerdict(); }) {}

bool FailureHandler::doubting() const {
  return std::any_of(lost_.begin(), lost_.end(),
                     [](const auto& item) { return !item.second.suspected; });
}

ProcessState FailureHandler::LookAt(int peer) const {
  return access_.process_state ? access_.process_state(peer) : ProcessState::kUnknown;
}

// ---- evidence ----

Status FailureHandler::RankFailed(int rank, const std::string& cause,
                                  const std::string& detail) const {
  return RankFailure(access_.world, access_.pending.OldestKey(), rank, cause, detail);
}

void FailureHandler::OnConnectionLost(int peer, const Status& reason, int64_t now_us) {
  const std::string transport = access_.links[static_cast<size_t>(peer)]->transport();
  lost_[peer] = {now_us, HasProcessEnded(peer) || transport == "shm" || transport == "inproc",
                 false, reason};
  // Hands back all frames: they point into memory that goes away with the link.
  access_.client->StopWork();
}

void FailureHandler::SettleVerdict(int peer) {
  // From now on the peer can't bar this rank.
  barred_ |= !access_.links[static_cast<size_t>(peer)]->ClaimVerdict();
}

void FailureHandler::Suspect(int rank, bool certain, const Status& status) {
  if (!access_.state.failure.ok() || access_.state.leaving) return;
  seen_.push_back({rank, certain, Shortened(status.message(), kMaxCause), EncodeRecord(status)});
  access_.client->StopWork();
}

// A process that was stopped may go on later. Where it can be barred from deciding, it is as
// certainly out as one that is gone.
bool FailureHandler::BarIfStopped(int peer) {
  const auto& link = access_.links[static_cast<size_t>(peer)];
  return link != nullptr && LookAt(peer) == ProcessState::kStopped && link->BarPeer();
}

bool FailureHandler::ClaimVerdict() {
  for (const auto& link : access_.links) {
    if (link != nullptr) barred_ |= !link->ClaimVerdict();
  }
  return !barred_;
}

// A process that was killed leaves its connections a moment before it is seen to be gone.
void FailureHandler::ClassifyLostPeers(int64_t now_us) {
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

void FailureHandler::Tick(int64_t now_us) {
  if (!access_.state.leaving) {
    HeartbeatMonitor& monitor = *access_.monitor;
    for (int peer : monitor.WantProcessState()) monitor.SetProcessState(peer, LookAt(peer));
    HeartbeatMonitor::Turn turn = monitor.Tick(now_us);
    for (const auto& [peer, beat] : turn.beats) {
      access_.control->Send(peer, FrameType::kBeat, kWorldSet, EncodeBeat(beat));
    }
    for (const Evidence& evidence : turn.evidence) {
      Suspect(evidence.rank, evidence.certain || BarIfStopped(evidence.rank),
              evidence.certain
                  ? RankFailed(evidence.rank, "its process ended or was killed", evidence.cause)
                  : RankFailed(evidence.rank, evidence.cause, ""));
    }
  }
  Advance(now_us);
  consensus_.Tick(now_us);
  Advance(now_us);
}

// A rank that has said goodbye takes no part any more: an agreement must not wait for it. This is
// added after the evidence that began the agreement, so that the rank is not taken for the culprit.
void FailureHandler::CountOutLeavers() {
  std::vector<Evidence> leavers;
  for (int peer : access_.departures->TakeGoodbyes()) leavers.push_back({peer, true, kHasLeft, ""});
  if (!leavers.empty()) consensus_.AddEvidence(leavers);
}

// ---- this rank's own failure ----

void FailureHandler::ReportBug(const Status& status, int64_t now_us) {
  Withdraw(status, FailureOf(access_.world.rank, status.message(), ""), now_us);
}

Status FailureHandler::FailureOf(int rank, const std::string& cause,
                                 const std::string& detail) const {
  return ProgramFailure(access_.world, access_.pending.OldestKey(), rank, cause, detail);
}

void FailureHandler::Withdraw(const Status& mine, const Status& theirs, int64_t now_us) {
  CheckOutcome(now_us);
  if (!access_.state.failure.ok()) return;
  access_.client->StopWork();
  consensus_.Withdraw(theirs.message(), EncodeRecord(theirs));
  if (!access_.state.leaving) {  // a goodbye says it all
    SendMessages();
    Flush();
  }
  // A cancelled step is over; what is submitted later fails because this rank has left the others.
  access_.client->EndAll(mine.code() == Code::kCancelled ? theirs : mine, mine, now_us);
}

// ---- the agreement ----

void FailureHandler::OnMessage(int peer, const ConsensusMessage& message) {
  // A rank that has said goodbye takes no part any more, but it answers what it knows.
  if (!access_.state.leaving || consensus_.outcome() != Outcome::kNone) {
    consensus_.Receive(peer, message);
  }
}

void FailureHandler::Advance(int64_t now_us) {
  ClassifyLostPeers(now_us);
  if (!seen_.empty()) consensus_.AddEvidence(std::exchange(seen_, {}));
  if (undecided() && !access_.state.leaving) {
    access_.monitor->WatchAll();
    CountOutLeavers();
  }
  SendMessages();
  CheckOutcome(now_us);
}

void FailureHandler::SendMessages() {
  access_.gate->SendMessages();
  const ConsensusMessage* last = nullptr;
  std::string bytes;
  for (const auto& [peer, message] : consensus_.TakeMessages()) {
    if (message.get() != last) bytes = EncodeConsensus(*message);
    last = message.get();
    access_.control->Send(peer, FrameType::kConsensus, kWorldSet, bytes);
  }
}

// Called before operations end with an error: a program that then exits at once must not take the
// unsent messages with it, or the others would see one more dead rank.
void FailureHandler::Flush() {
  bool moved = false;
  for (size_t p = 0; p < access_.links.size(); ++p) {
    if (access_.links[p] == nullptr) continue;
    access_.control->Flush(static_cast<int>(p));
    // An error is final: Engine::Poll meets it again.
    static_cast<void>(access_.links[p]->Pump(&moved).ok());
  }
}

// Called by the agreement when it learns of the first evidence.
std::vector<CommitPoint> FailureHandler::Freeze() {
  access_.client->StopWork();
  return access_.gate->Freeze();
}

// ---- the outcome ----

void FailureHandler::CheckOutcome(int64_t now_us) {
  const EngineState& state = access_.state;
  if (!state.failure.ok() || state.leaving || consensus_.outcome() == Outcome::kNone) return;
  Flush();
  const Status status =
      OutcomeStatus(access_.world, access_.config, access_.pending.OldestKey(), consensus_);
  access_.client->EndAll(status, status, now_us);
}

}  // namespace tfdist
