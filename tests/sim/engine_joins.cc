// Ranks that run out of data: as a part of a program, and as they join.
#include <algorithm>

#include "engine_world.h"

namespace tfdist::sim {
namespace {

bool IsBucket(const Call& call) {
  return call.kind == CollectiveKind::kAllreduce && !call.group.empty();
}

// A process set has as many names as it was added under.
bool SameSet(const Call& a, const Call& b) {
  if (a.kind == CollectiveKind::kSendRecv || b.kind == CollectiveKind::kSendRecv) return false;
  return a.set == b.set || (!a.set.empty() && !b.set.empty() && a.members == b.members);
}

// Two steps in one: what comes again under a name comes before the first one has ended.
void Overlap(Program* program, Rng* rng) {
  auto& phases = program->phases;
  for (size_t p = program->first_step; p + 1 < phases.size(); ++p) {
    if (!rng->Chance(30)) continue;
    for (const Call& call : phases[p + 1].calls) phases[p].calls.push_back(call);
    phases.erase(phases.begin() + static_cast<std::ptrdiff_t>(p) + 1);
  }
}

void Average(Program* program, Rng* rng) {
  std::map<std::string, bool> groups;  // and what repeats
  for (Phase& phase : program->phases) {
    for (Call& call : phase.calls) {
      if (call.kind != CollectiveKind::kAllreduce || call.dtype == DType::kInt32) continue;
      const bool own = rng->Chance(50);
      const std::string& name = call.repeats ? call.key : call.group;
      call.average = name.empty() ? own : groups.emplace(name, own).first->second;
    }
  }
}

// From one step on a bucket has another shape, or in one step only.
void Reshape(Program* program, Rng* rng) {
  const auto first = static_cast<int64_t>(program->first_step);
  const auto end = static_cast<int64_t>(program->phases.size());
  for (int64_t n = rng->Between(0, 3); n > 0; --n) {
    std::string key;
    const bool stays = rng->Chance(50);
    for (auto p = rng->Between(first, end - 1); p < end; ++p) {
      for (Call& call : program->phases[static_cast<size_t>(p)].calls) {
        if (key.empty() && IsBucket(call) && rng->Chance(40)) {
          key = call.key;
        } else if (call.key != key || !stays) {
          continue;
        }
        ++call.rows;
      }
    }
  }
}

// A group of `like`'s process set that is registered in phase `at` and used from the next one on.
void AddGroup(Program* program, size_t at, const Call& like, const std::string& name, Rng* rng) {
  Call call;
  call.kind = CollectiveKind::kRegister;
  call.key = "gradients " + name;
  call.group = name;
  call.set = like.set;
  call.members = call.callers = like.members;
  program->phases[at].calls.push_back(call);
  call.kind = CollectiveKind::kAllreduce;
  call.buckets = static_cast<int>(rng->Between(1, 3));
  call.average = true;
  for (size_t p = at + 1; p < program->phases.size(); ++p) {
    for (call.bucket = 0; call.bucket < call.buckets; ++call.bucket) {
      call.key = "g." + name + "." + std::to_string(call.bucket);
      call.number = static_cast<int>(1000 + 10 * p) + call.bucket;
      call.rows = 50 + call.bucket;
      program->phases[p].calls.push_back(call);
    }
  }
}

// Who calls what, now that the ranks of the set stop where `join` says.
void LeaveOut(Program* program, size_t begin, Join* join, Rng* rng) {
  std::vector<int> last = join->call.members;  // who has called the last of them
  for (size_t p = begin; p < join->end; ++p) {
    std::vector<int> callers;
    for (const auto& [rank, from] : join->from) {
      if (from > p) callers.push_back(rank);
    }
    auto& calls = program->phases[p].calls;
    const auto own = [&](const Call& call) { return SameSet(call, join->call); };
    if (std::any_of(calls.begin(), calls.end(), own) && !callers.empty()) last = callers;
    if (callers.empty()) calls.erase(std::remove_if(calls.begin(), calls.end(), own), calls.end());
    for (Call& call : calls) {
      if (!own(call)) continue;
      call.callers = callers;
      const bool gives =
          call.kind == CollectiveKind::kBroadcast || call.kind == CollectiveKind::kScatter;
      if (gives && std::find(callers.begin(), callers.end(), call.root) == callers.end()) {
        call.root = callers[static_cast<size_t>(rng->Index(callers.size()))];
      }
    }
  }
  join->latest = last.front();
  join->complete = static_cast<int>(last.size());
}

}  // namespace

void AddJoins(Program* program, Rng* rng) {
  Overlap(program, rng);
  Average(program, rng);
  Reshape(program, rng);
  std::vector<Call> sets;  // a call of each
  for (const Phase& phase : program->phases) {
    for (const Call& call : phase.calls) {
      if (call.kind == CollectiveKind::kSendRecv) continue;
      const bool known = std::any_of(sets.begin(), sets.end(),
                                     [&](const Call& other) { return SameSet(call, other); });
      if (!known) sets.push_back(call);
    }
  }
  for (const Call& like : sets) {
    size_t begin = program->first_step;
    bool late_group = false;
    while (begin <= program->phases.size() && rng->Chance(begin == program->first_step ? 80 : 50)) {
      Join join;
      join.call.kind = CollectiveKind::kJoin;
      join.call.key = "join";
      join.call.set = like.set;
      join.call.members = join.call.callers = like.members;
      const auto size = static_cast<int64_t>(program->phases.size());
      const int64_t low = rng->Between(static_cast<int64_t>(begin), size);
      const int64_t end = rng->Between(low, size);
      for (int rank : like.members) join.from[rank] = static_cast<size_t>(rng->Between(low, end));
      join.end = static_cast<size_t>(end);
      if (low < end && !late_group && rng->Chance(40)) {
        late_group = true;
        join.from.begin()->second = join.end;  // somebody registers it
        AddGroup(program, static_cast<size_t>(low), like, "late" + like.set, rng);
      }
      LeaveOut(program, static_cast<size_t>(low), &join, rng);
      program->joins.push_back(std::move(join));
      begin = static_cast<size_t>(end);
      if (rng->Chance(70)) ++begin;  // else one after the other
    }
  }
  for (Join& join : program->joins) {
    for (size_t p = 0; p < join.end; ++p) {
      for (const Call& call : program->phases[p].calls) {
        if (IsBucket(call) && SameSet(call, join.call)) ++join.steps[call.group][call.bucket];
      }
    }
  }
}

// ---- a rank that joins ----

bool EngineWorld::CallJoins(Rank* rank) {
  rank->held_up = false;
  for (size_t place = 0; place < program_.joins.size() && !rank->held_up; ++place) {
    const Join& join = program_.joins[place];
    const auto from = join.from.find(rank->rank);
    if (from == join.from.end() || from->second > rank->phase) continue;
    if (rank->joins[place] == JoinState::kNone) {
      rank->joins[place] = JoinState::kCalled;
      Submit(rank, join.call, static_cast<int>(place));
    }
    rank->held_up = join.end <= rank->phase && rank->joins[place] != JoinState::kEnded;
  }
  return !rank->held_up;
}

void EngineWorld::EndJoin(Rank* rank, const Running& running) {
  const auto place = static_cast<size_t>(running.join);
  const Join& join = program_.joins[place];
  const int latest = static_cast<int>(running.answer.number);
  const auto complete = static_cast<int>(running.answer.rows[0]);
  rank->joins[place] = JoinState::kEnded;
  // Who leaves out a call has called less than the program says.
  if (skipped_key_.empty() && (latest != join.latest || complete != join.complete)) {
    Violation("rank " + std::to_string(rank->rank) + " joined: latest " + std::to_string(latest) +
              " of " + std::to_string(complete) + ", expected " + std::to_string(join.latest) +
              " of " + std::to_string(join.complete));
  }
  const auto [first, is_first] = join_ends_.emplace(place, std::pair(latest, complete));
  if (!is_first && first->second != std::pair(latest, complete)) {
    Violation("the ranks do not agree on who joined last");
  }
  // It has taken part in what it did not call.
  for (const auto& [group, steps] : join.steps) rank->applied[group] = steps;
  if (rank->held_up) StartPhase(rank);
}

// Whether the rank has joined the set of a group.
bool EngineWorld::Joins(const Rank& rank, const std::string& group) const {
  for (size_t place = 0; place < program_.joins.size(); ++place) {
    const bool is_in = program_.joins[place].steps.count(group) > 0;
    if (is_in && rank.joins[place] == JoinState::kCalled) return true;
  }
  return false;
}

}  // namespace tfdist::sim
