#include "scheduler/deadline_watch.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/logging.h"
#include "scheduler/wire.h"

namespace tfdist {
namespace {

// After the leader's deadline the other ranks wait a little longer, so that the error they report
// is the leader's, who knows which ranks are missing.
constexpr int64_t kLeaderGraceUs = 500 * 1000;

}  // namespace

// A slow connection causes no timeout. Operations behind one that moves may be waiting for their
// turn, so their timeouts restart too.
void DeadlineWatch::Prolong(int64_t now_us) {
  for (const auto& [id, set] : access_.sets) {
    bool moves = false;
    for (const auto& [turn, active] : set->active) {
      moves |= active.moved_us >= prolonged_us_;
      if (!moves) continue;
      for (const auto& member : active.operation->members()) {
        const auto timeout_us = static_cast<int64_t>(member->info.timeout_s * 1e6);
        member->deadline_us = access_.state.own_us + timeout_us;
      }
    }
  }
  prolonged_us_ = now_us;
}

void DeadlineWatch::WarnOfStalls(ProcessSet* set) {
  const int64_t own_us = access_.state.own_us;
  const auto warning_us = static_cast<int64_t>(access_.config.stall_warning_s * 1e6);
  std::vector<Stall> stalls = set->negotiator->TakeStalls(own_us, warning_us);
  for (Stall& stall : set->stall_tracker->TakeStalls(own_us, warning_us)) {
    stalls.push_back(std::move(stall));
  }
  for (Stall& stall : set->joins->TakeStalls(own_us, warning_us)) {
    stalls.push_back(std::move(stall));
  }
  for (const Stall& stall : stalls) {
    TFDIST_LOG(kWarning, access_.world.rank, "STALL",
               stall.text << (stall.kind == CollectiveKind::kJoin
                                  ? ", which made no calls meanwhile."
                                  : ", which did not call it yet. Check that all ranks take the "
                                    "same steps, and the same number of steps.")
                          << " The wait ends after its timeout.");
    set->stalls[stall.key] = stall.text;
    access_.control->SendToMembers(*set, FrameType::kStall, EncodeStall(stall.key, stall.text));
  }
}

void DeadlineWatch::EndExpired(const ProcessSet& set, int64_t now_us) {
  const int64_t own_us = access_.state.own_us;
  std::optional<Stall> expired = set.negotiator->Expired(own_us);
  if (!expired) expired = set.stall_tracker->Expired(own_us);
  if (!expired) expired = set.joins->Expired(own_us);
  if (!expired) expired = access_.gate.ExpiredStep(set, own_us, now_us);
  if (!expired) return;
  ErrorRecord record{"timeout", -1, "", 0, expired->key, "deadline passed", expired->text};
  std::string message = expired->text;
  if (!expired->missing.empty()) {  // else this rank's own program has not called it
    record.rank = expired->missing[0];
    record.host = HostOf(access_.world, record.rank);
    message +=
        "; its timeout has passed. The missing ranks are alive but did not call it: look for a "
        "step that only some ranks take, or raise TFDIST_TIMEOUT_S.";
  }
  access_.failures->Suspect(kNoRank, true, Status(Code::kDeadlineExceeded, message, record));
}

void DeadlineWatch::EndLate(int64_t now_us) {
  const int64_t limit = access_.state.own_us - kLeaderGraceUs;
  const Request* late = nullptr;
  const ProcessSet* of = nullptr;
  access_.pending.ForEachInSets([&](const ProcessSet& set, const Request& request) {
    if (request.deadline_us >= limit || StepGate::Holds(set, request)) return;
    late = &request;
    of = &set;
  });
  for (const auto& [id, set] : access_.sets) {
    const std::optional<Stall> step = access_.gate.ExpiredStep(*set, limit, now_us);
    if (!step) continue;
    access_.failures->Suspect(
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
                DescribeRank(access_.world, of->leader());
  const Status status(Code::kDeadlineExceeded, text + "; its timeout has passed.",
                      ErrorRecord{"timeout", -1, "", 0, info.key, "deadline passed", text});
  access_.failures->Suspect(kNoRank, true, status);
}

}  // namespace tfdist
