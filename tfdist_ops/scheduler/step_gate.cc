#include "scheduler/step_gate.h"

#include <algorithm>
#include <utility>

#include "scheduler/request_check.h"
#include "scheduler/request_match.h"

namespace tfdist {
namespace {

// A group as all ranks name it: its number is unique in its set only.
uint64_t GateGroup(uint32_t set, uint32_t number) { return (uint64_t{set} << 32) | number; }

int64_t StepOf(const Request& request) { return TicketSequence(request.info.predicted); }

}  // namespace

// Steps are counted by the numbers that the ranks have agreed on for groups.
Status StepGate::Check(const Request& request) const {
  if (access_.config.atomic_steps == 0 || !IsBucket(request) || request.info.predicted != 0) {
    return Status();
  }
  return InvalidRequest(
      request.info.key,
      "TFDIST_ATOMIC_STEPS=1 needs a group of gradients that was registered, at most " +
          std::to_string(kMaxGroupNumber) + " groups with at most 65536 buckets each");
}

// Steps of a group never overlap: a bucket of a later one has to wait.
bool StepGate::Admit(ProcessSet* set, const Request& request) {
  if (set->gate == nullptr || !IsBucket(request)) return true;
  ProcessSet::GatedGroup& group = set->gated[TicketGroup(request.info.predicted)];
  if (StepOf(request) > group.released + 1) return false;
  group.buckets = static_cast<size_t>(request.bucket_count);
  ++group.submitted;
  return true;
}

void StepGate::Postpone(ProcessSet* set, std::unique_ptr<Request> request) {
  set->gated[TicketGroup(request->info.predicted)].later.push_back(std::move(request));
}

// An operation of this rank is over. A bucket is held back, also one that the ranks did not agree
// on: its step ends as a whole, on all ranks alike.
void StepGate::End(ProcessSet* set, std::unique_ptr<Request> request, const Status& status,
                   int64_t now_us) {
  if (set->gate == nullptr || !IsBucket(*request)) {
    access_.requests->Finish(std::move(request), status);
    return;
  }
  if (!access_.state.failure.ok()) {
    access_.requests->Finish(std::move(request), access_.state.failure);
    return;
  }
  const uint32_t number = TicketGroup(request->info.predicted);
  const int64_t step = StepOf(*request);
  ProcessSet::GatedGroup& group = set->gated[number];
  if (group.error.ok()) group.error = status;
  group.held.push_back(std::move(request));
  if (group.held.size() < group.buckets || access_.state.stopped) return;
  const Status complete = set->gate->Complete(GateGroup(set->id, number), step);
  if (!complete.ok()) access_.failures->ReportBug(complete, now_us);
  Release(set, now_us);
}

void StepGate::Send(ProcessSet* set) {
  for (const auto& [peer, message] : set->gate->TakeMessages()) {
    ++messages_sent_;
    access_.control->Send(peer, FrameType::kGate, set->id, EncodeGate(message));
  }
}

void StepGate::Release(ProcessSet* set, int64_t now_us) {
  Send(set);  // before a leader can go on: it tells a rank that has joined of the next step
  for (const CommitPoint& point : set->gate->TakeReleased()) {
    ProcessSet::GatedGroup& group = set->gated[static_cast<uint32_t>(point.group)];
    group.released = point.step;
    group.submitted = 0;
    const Status status = std::exchange(group.error, Status());
    auto held = std::exchange(group.held, {});
    auto later = std::exchange(group.later, {});
    for (auto& request : held) access_.requests->Finish(std::move(request), status);
    for (auto& request : later) {
      if (access_.state.stopped) {
        access_.requests->EndStopped(std::move(request));
      } else if (Admit(set, *request)) {
        access_.requests->Enqueue(set, std::move(request), now_us);
      } else {
        group.later.push_back(std::move(request));
      }
    }
  }
}

// The verdict says which steps count; without a verdict none that is still held does.
Status StepGate::Resolve(const FailureConsensus& consensus, int64_t now_us) {
  Status torn;
  if (consensus.outcome() != Outcome::kDecided) return torn;
  for (auto& [id, set] : access_.sets) {
    if (set->gate == nullptr) continue;
    const Status status = set->gate->Resolve(consensus.verdict().commits);
    if (torn.ok()) torn = status;
    Release(set.get(), now_us);
  }
  return torn;
}

void StepGate::OnMessage(ProcessSet* set, int peer, const GateMessage& message, int64_t now_us) {
  set->gate->Receive(peer, message);
  Release(set, now_us);
}

void StepGate::SendMessages() {
  for (auto& [id, set] : access_.sets) {
    if (set->gate != nullptr) Send(set.get());
  }
}

std::vector<CommitPoint> StepGate::Freeze() {
  std::vector<CommitPoint> points;
  for (auto& [id, set] : access_.sets) {
    if (set->gate == nullptr) continue;
    for (const CommitPoint& point : set->gate->Freeze()) points.push_back(point);
  }
  return points;
}

void StepGate::TakeHeld(PendingRequests* pending) {
  for (auto& [id, set] : access_.sets) {
    for (auto& [number, group] : set->gated) {
      for (auto& request : group.held) pending->Stop(std::move(request));
      group.held.clear();
    }
  }
}

bool StepGate::Holds(const ProcessSet& set, const Request& request) {
  for (const auto& [number, group] : set.gated) {
    for (const auto& held : group.held) {
      if (held.get() == &request) return true;
    }
  }
  return false;
}

// A step that the gate has held past its deadline. Where other buckets of the step are under way,
// their own deadlines say more.
std::optional<Stall> StepGate::ExpiredStep(const ProcessSet& set, int64_t limit_us,
                                           int64_t now_us) const {
  for (const auto& [number, group] : set.gated) {
    if (group.held.empty() || group.submitted > group.held.size()) continue;
    const auto oldest = std::min_element(
        group.held.begin(), group.held.end(),
        [](const auto& a, const auto& b) { return a->deadline_us < b->deadline_us; });
    const Request& request = **oldest;
    if (request.deadline_us >= limit_us) continue;
    const std::string waited = std::to_string((now_us - request.submitted_us) / 1000000) + " s";
    const std::string step = "step " + std::to_string(group.released + 1) + " of \"" +
                             request.info.key + "\"" + set.Text();
    if (group.held.size() < group.buckets) {
      return Stall{request.info.key,
                   request.info.kind,
                   now_us - request.submitted_us,
                   {},
                   step + " has waited " + waited + ": " + std::to_string(group.held.size()) +
                       " of its " + std::to_string(group.buckets) +
                       " buckets were submitted here. With TFDIST_ATOMIC_STEPS=1 a step is handed "
                       "out as a whole: submit all of its buckets before you wait for one"};
    }
    std::vector<int> missing = set.gate->Missing(GateGroup(set.id, number), group.released + 1);
    std::string text = step + " is complete here and has waited " + waited;
    if (set.index == 0) {
      text += " for " + RankList(missing) + " to complete it";
    } else {
      text += " for " + DescribeRank(access_.world, set.leader()) +
              " to confirm that all ranks have it";
    }
    return Stall{request.info.key, request.info.kind, now_us - request.submitted_us,
                 std::move(missing), text};
  }
  return std::nullopt;
}

}  // namespace tfdist
