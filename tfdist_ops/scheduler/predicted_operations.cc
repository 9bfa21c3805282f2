#include "scheduler/predicted_operations.h"

#include <algorithm>
#include <utility>

namespace tfdist {
namespace {

// How long a predicted operation may stand still before its rank says so: the leader has the other
// half of a short timeout to ask who is missing.
int64_t PatienceUs(double timeout_s) {
  return std::min<int64_t>(500 * 1000, static_cast<int64_t>(timeout_s * 1e6) / 2);
}

}  // namespace

void PredictedOperations::Start(ProcessSet* set, std::unique_ptr<Request> request, int64_t now_us) {
  const uint64_t ticket = request->info.predicted;
  request->agreed_us = now_us;
  request->contributors = Contributors(set->joined, set->size(), ticket);
  ++started_;
  if (request->contributors < set->size()) {
    access_.joins->OnStarted(set, ticket, request->info, now_us);
  }
  if (!access_.runner->StartKept(set, &request, now_us)) {
    std::vector<std::unique_ptr<Request>> members;
    members.push_back(std::move(request));
    access_.runner->Start(set, ticket, std::move(members), now_us);
    const auto active = set->active.find(TurnOf(ticket));
    if (active != set->active.end()) active->second.agreement = set->book.Agreements(ticket);
  }
  if (set->probed.erase(ticket) > 0) {
    SendAnswer(set, ticket, StallTracker::Answer::kRunning);
  }
  for (int32_t rank : set->ranks) {
    if (rank != access_.rank && access_.departures->HasLeft(rank)) {
      access_.departures->CheckPredicted(rank);
    }
  }
}

void PredictedOperations::OnEnd(ProcessSet* set, uint64_t ticket) {
  if (set->reported_waits.erase(ticket) == 0) return;
  set->stalls.clear();
  SendAnswer(set, ticket, StallTracker::Answer::kDone);
}

void PredictedOperations::SendAnswer(ProcessSet* set, uint64_t ticket,
                                     StallTracker::Answer answer) {
  const ProbeNote note{ticket, static_cast<uint8_t>(answer)};
  if (set->stall_tracker != nullptr) {
    OnAnswer(set, access_.rank, note);
  } else {
    access_.control->Send(set->leader(), FrameType::kProbeAnswer, set->id, EncodeProbe(note));
  }
}

void PredictedOperations::Tick(ProcessSet* set) {
  std::vector<WaitNote> notes;
  for (const auto& [turn, active] : set->active) {
    const Request& request = *active.operation->members()[0];
    const uint64_t ticket = active.operation->ticket();
    const int64_t waited_us = access_.state.own_us - active.since_us;
    if (!IsPredicted(ticket) || waited_us < PatienceUs(request.info.timeout_s) ||
        !set->reported_waits.insert(ticket).second) {
      continue;
    }
    notes.push_back({ticket, waited_us, request.info});
  }
  for (WaitNote& note : notes) {
    if (access_.state.stopped) return;
    if (set->stall_tracker != nullptr) {
      OnWait(set, access_.rank, std::move(note));
    } else {
      access_.control->Send(set->leader(), FrameType::kWaiting, set->id, EncodeWait(note));
    }
  }
}

void PredictedOperations::OnWait(ProcessSet* set, int rank, WaitNote note) {
  const uint64_t ticket = note.ticket;
  note.info.set = set->id;
  if (set->stall_tracker->Add(rank, ticket, std::move(note.info),
                              access_.state.own_us - note.waited_us)) {
    for (int32_t other : set->ranks) {
      if (other == rank) continue;
      if (other == access_.rank) {
        set->stall_tracker->OnAnswer(other, ticket, Answer(set, ticket));
      } else {
        ++probes_sent_;
        access_.control->Send(other, FrameType::kProbe, set->id, EncodeProbe({ticket, 0}));
      }
    }
  }
  CheckMismatch(set);
}

void PredictedOperations::OnProbe(ProcessSet* set, uint64_t ticket) {
  SendAnswer(set, ticket, Answer(set, ticket));
}

void PredictedOperations::OnAnswer(ProcessSet* set, int rank, const ProbeNote& note) {
  set->stall_tracker->OnAnswer(rank, note.ticket, static_cast<StallTracker::Answer>(note.answer));
  CheckMismatch(set);
}

StallTracker::Answer PredictedOperations::Answer(ProcessSet* set, uint64_t ticket) {
  if (set->active.count(TurnOf(ticket)) > 0) return StallTracker::Answer::kRunning;
  bool asks = false;  // for agreement, because it is not what was agreed on before
  for (const auto& [key, queue] : set->entries) {
    for (const auto& request : queue) asks |= request->info.predicted == ticket;
  }
  if (!asks && set->book.Submitted(ticket)) return StallTracker::Answer::kDone;
  set->probed.insert(ticket);
  return StallTracker::Answer::kNotSubmitted;
}

// The ranks that wait have exchanged data of the operation already: what they hold is worth
// nothing, and a rank that did not take part has counted otherwise. So this mismatch ends the work.
void PredictedOperations::CheckMismatch(ProcessSet* set) {
  if (access_.state.stopped || set->stall_tracker == nullptr || set->stall_tracker->empty()) return;
  const Status status = set->stall_tracker->FindMismatch(*set->negotiator, access_.state.own_us);
  if (!status.ok()) access_.failures->Suspect(kNoRank, true, status);
}

}  // namespace tfdist
