// The commit gate in the engine: the `done`s of a step of gradients wait until every rank of the
// set has the whole step (membership/commit.h). Only `done` waits; frames and memory do not.
#include <algorithm>
#include <utility>

#include "scheduler/agreement.h"
#include "scheduler/check_request.h"
#include "scheduler/engine.h"

namespace tfdist {
namespace {

// A group as all ranks name it: its number is unique in its set only.
uint64_t GateGroup(uint32_t set, uint32_t number) { return (uint64_t{set} << 32) | number; }

int64_t StepOf(const Request& request) { return TicketSequence(request.info.predicted); }

}  // namespace

// Steps are counted by the numbers that the ranks have agreed on for groups.
Status Engine::CheckGate(const Request& request) const {
  if (config_.atomic_steps == 0 || !IsBucket(request) || request.info.predicted != 0) {
    return Status();
  }
  return InvalidRequest(
      request.info.key,
      "TFDIST_ATOMIC_STEPS=1 needs a group of gradients that was registered, at most " +
          std::to_string(kMaxGroupNumber) + " groups with at most 65536 buckets each");
}

// Steps of a group never overlap: a bucket of a later one has to wait.
bool Engine::StepIsOpen(ProcessSet* set, const Request& request) {
  if (set->gate == nullptr || !IsBucket(request)) return true;
  ProcessSet::GatedGroup& group = set->gated[TicketGroup(request.info.predicted)];
  if (StepOf(request) > group.released + 1) return false;
  group.buckets = static_cast<size_t>(request.bucket_count);
  ++group.submitted;
  return true;
}

// An operation of this rank is over. A bucket is held back, also one that the ranks did not agree
// on: its step ends as a whole, on all ranks alike.
void Engine::EndMember(ProcessSet* set, std::unique_ptr<Request> request, const Status& status,
                       int64_t now_us) {
  if (set->gate == nullptr || !IsBucket(*request)) {
    Finish(std::move(request), status);
    return;
  }
  if (!state_.failure.ok()) {
    Finish(std::move(request), state_.failure);
    return;
  }
  const uint32_t number = TicketGroup(request->info.predicted);
  const int64_t step = StepOf(*request);
  ProcessSet::GatedGroup& group = set->gated[number];
  if (group.error.ok()) group.error = status;
  group.held.push_back(std::move(request));
  if (group.held.size() < group.buckets || state_.stopped) return;
  const Status complete = set->gate->Complete(GateGroup(set->id, number), step);
  if (!complete.ok()) ReportBug(complete, now_us);
  ReleaseSteps(set, now_us);
}

void Engine::TellGate(ProcessSet* set) {
  for (const auto& [peer, word] : set->gate->TakeMessages()) {
    ++gate_messages_;
    control_.Send(peer, FrameType::kGate, set->id, EncodeGate(word));
  }
}

void Engine::ReleaseSteps(ProcessSet* set, int64_t now_us) {
  TellGate(
      set);  // before a leader can go on: a rank that has joined is told of the next step by it
  for (const CommitPoint& point : set->gate->TakeReleased()) {
    ProcessSet::GatedGroup& group = set->gated[static_cast<uint32_t>(point.group)];
    group.released = point.step;
    group.submitted = 0;
    const Status status = std::exchange(group.error, Status());
    auto held = std::exchange(group.held, {});
    auto later = std::exchange(group.later, {});
    for (auto& request : held) Finish(std::move(request), status);
    for (auto& request : later) {
      if (state_.stopped) {
        EndRequest(std::move(request));
      } else if (StepIsOpen(set, *request)) {
        Enqueue(set, std::move(request), now_us);
      } else {
        group.later.push_back(std::move(request));
      }
    }
  }
}

// The verdict says which steps count; without a verdict none that is still held does. An error is a
// bug: end with it rather than apply a torn step.
Status Engine::ResolveGates(int64_t now_us) {
  Status torn;
  if (agreement_.outcome() != Outcome::kDecided) return torn;
  for (auto& [id, set] : sets_) {
    if (set->gate == nullptr) continue;
    const Status status = set->gate->Resolve(agreement_.verdict().commits);
    if (torn.ok()) torn = status;
    ReleaseSteps(set.get(), now_us);
  }
  return torn;
}

// A step that the gate has held past its deadline. Where other buckets of the step are under way,
// their own deadlines say more.
std::optional<Stall> Engine::ExpiredStep(const ProcessSet& set, int64_t limit_us,
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
      text += " for the word of " + DescribeRank(world_, set.leader()) + " that all ranks have it";
    }
    return Stall{request.info.key, request.info.kind, now_us - request.submitted_us,
                 std::move(missing), text};
  }
  return std::nullopt;
}

}  // namespace tfdist
