#include "membership/commit.h"

#include <algorithm>
#include <string>

namespace tfdist {

Status CommitGate::Complete(uint64_t group, int64_t step) {
  Group& state = groups_[group];
  if (step != state.complete + 1 || state.complete != state.released) {
    return TFDIST_INTERNAL("step " + std::to_string(step) + " of a group is complete after step " +
                           std::to_string(state.complete) + ", and the last released step is " +
                           std::to_string(state.released));
  }
  state.complete = step;
  if (frozen_) return Status();
  if (rank_ == leader()) {
    Note(rank_, group, step);
  } else {
    messages_.push_back({leader(), {GateMessage::Kind::kComplete, group, step}});
  }
  return Status();
}

void CommitGate::Receive(int from, const GateMessage& message) {
  if (frozen_ || !std::binary_search(members_.begin(), members_.end(), from)) return;
  if (message.kind == GateMessage::Kind::kComplete) {
    if (rank_ == leader()) Note(from, message.group, message.step);
    return;
  }
  const auto it = groups_.find(message.group);
  if (from != leader() || it == groups_.end() || message.step > it->second.complete) return;
  Release(message.group, &it->second, message.step);
}

void CommitGate::Note(int member, uint64_t group, int64_t step) {
  Group& state = groups_[group];
  int64_t& known = state.complete_at[member];
  known = std::max(known, step);
  if (state.complete_at.size() < members_.size()) return;
  int64_t everywhere = known;
  for (const auto& [rank, complete] : state.complete_at) {
    everywhere = std::min(everywhere, complete);
  }
  if (everywhere <= state.announced) return;
  state.announced = everywhere;
  for (int peer : members_) {
    if (peer != rank_) {
      messages_.push_back({peer, {GateMessage::Kind::kCommit, group, everywhere}});
    }
  }
  Release(group, &state, everywhere);
}

void CommitGate::Release(uint64_t id, Group* group, int64_t step) {
  while (group->released < step) releases_.push_back({id, ++group->released});
}

std::vector<CommitPoint> CommitGate::Freeze() {
  frozen_ = true;
  std::vector<CommitPoint> points;
  for (const auto& [id, group] : groups_) points.push_back({id, group.released});
  return points;
}

Status CommitGate::Resolve(const std::vector<CommitPoint>& points) {
  frozen_ = true;
  Status status;
  for (auto& [id, group] : groups_) {
    int64_t step = 0;
    for (const CommitPoint& point : points) {
      if (point.group == id) step = point.step;
    }
    if (step > group.complete || step < group.released) {
      status =
          TFDIST_INTERNAL("the verdict commits step " + std::to_string(step) +
                          " of a group; here step " + std::to_string(group.complete) +
                          " is complete and step " + std::to_string(group.released) + " released");
      continue;
    }
    Release(id, &group, step);
    group.complete = step;
  }
  return status;
}

std::vector<int> CommitGate::Missing(uint64_t group, int64_t step) const {
  std::vector<int> missing;
  const auto it = groups_.find(group);
  if (it == groups_.end()) return rank_ == leader() ? members_ : std::vector<int>{rank_};
  if (rank_ != leader()) {
    if (it->second.complete < step) missing.push_back(rank_);
    return missing;
  }
  for (int member : members_) {
    const auto known = it->second.complete_at.find(member);
    if (known == it->second.complete_at.end() || known->second < step) missing.push_back(member);
  }
  return missing;
}

int64_t CommitGate::waiting() const {
  int64_t waiting = 0;
  for (const auto& [id, group] : groups_) waiting += group.complete - group.released;
  return waiting;
}

}  // namespace tfdist
