// CommitGate: no rank applies a step before every rank has it. A pure state machine: no clock, no
// sockets, no threads.
//
// The operations of a group's step complete at different times on different ranks, and if a rank
// fails in between, some ranks have the whole sum and others never will. With the gate on, the
// caller holds back the `done` callbacks of all buckets of (group, step) until the gate releases
// the step:
//
//   every member:  Complete(group, step)  → kComplete to the leader (the set's smallest rank)
//   leader:        kComplete of all       → kCommit to all others; releases the step here
//   every member:  kCommit of the leader  → TakeReleased() names the step: run its `done`s
//
// Source: two-phase commit, J. Gray, "Notes on Data Base Operating Systems", 1978; the agreement on
// a verdict takes the place of its recovery.
//
// On a failure the gate freezes: a commit that arrives later is ignored. The report of the frozen
// gate goes into the agreement (membership/failure_consensus.h). The verdict contains, for every
// group, the highest step that a survivor had released. Every survivor has completed this step,
// because a commit is announced only after all members have completed it. All later steps are
// discarded on every rank.
//
// Duties of the caller:
//   - number the steps of a group from 1 in every generation, call Complete once a step, in order,
//     and not start a step before the one before it was released;
//   - send TakeMessages(), hand what arrives to Receive, run the `done`s of TakeReleased();
//   - give Freeze() to the FailureConsensus as its `freeze`; when there is a verdict, call
//     Resolve(commits), run the `done`s of TakeReleased() with ok, then end what is still held with
//     the verdict's status. Without a verdict (evicted, no majority, not agreed, withdrawn), end
//     everything that is held with the status of that outcome.
#ifndef TFDIST_OPS_MEMBERSHIP_COMMIT_H_
#define TFDIST_OPS_MEMBERSHIP_COMMIT_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace tfdist {

// A step of a group: the last one released on a rank (Freeze), the last one that is applied
// (commits of a verdict), or one to release (TakeReleased).
struct CommitPoint {
  uint64_t group = 0;
  int64_t step = 0;
};
inline bool operator==(const CommitPoint& a, const CommitPoint& b) {
  return a.group == b.group && a.step == b.step;
}

struct GateMessage {
  enum class Kind : uint8_t { kComplete = 1, kCommit = 2 };
  Kind kind = Kind::kComplete;
  uint64_t group = 0;
  int64_t step = 0;
};

class CommitGate {
 public:
  // `members`: the ranks of the process set, sorted, this one included.
  CommitGate(int rank, std::vector<int> members) : rank_(rank), members_(std::move(members)) {}

  // All buckets of (group, step) are complete here.
  Status Complete(uint64_t group, int64_t step);
  void Receive(int from, const GateMessage& message);

  // From now on, commits are ignored. Returns the last released step of every group known here.
  std::vector<CommitPoint> Freeze();
  // Releases the steps up to the verdict's commit points and forgets those above. An error is a
  // bug: a point above the last complete step here, or below the last released one.
  Status Resolve(const std::vector<CommitPoint>& points);

  std::vector<std::pair<int, GateMessage>> TakeMessages() { return std::exchange(messages_, {}); }
  std::vector<CommitPoint> TakeReleased() { return std::exchange(releases_, {}); }
  // The members that have not completed the step, as far as this rank knows: on the leader, any
  // member; elsewhere, at most this rank itself.
  std::vector<int> Missing(uint64_t group, int64_t step) const;
  // Steps completed here that wait for their commit.
  int64_t waiting() const;

 private:
  struct Group {
    int64_t complete = 0;                // here
    int64_t released = 0;                // here
    std::map<int, int64_t> complete_at;  // leader: by member
    int64_t announced = 0;               // leader
  };
  int leader() const { return members_.front(); }
  void Note(int member, uint64_t group, int64_t step);
  void Release(uint64_t id, Group* group, int64_t step);

  const int rank_;
  const std::vector<int> members_;
  std::map<uint64_t, Group> groups_;
  bool frozen_ = false;
  std::vector<std::pair<int, GateMessage>> messages_;
  std::vector<CommitPoint> releases_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_MEMBERSHIP_COMMIT_H_
