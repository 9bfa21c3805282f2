// ProcessSet: some of the ranks, and all that the engine keeps for them alone. Nothing in it is
// shared with another set: a set that waits holds up no other.
//
// The world is set 0. Sets of two ranks exist without agreement, for send and receive
// (PairSetId). All other sets are agreed on by the world, through rank 0 (SetTable).
#ifndef TFDIST_OPS_SCHEDULER_PROCESS_SET_H_
#define TFDIST_OPS_SCHEDULER_PROCESS_SET_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "membership/commit.h"
#include "scheduler/join.h"
#include "scheduler/negotiator.h"
#include "scheduler/operation.h"
#include "scheduler/operation_plan.h"
#include "scheduler/stall_tracker.h"
#include "scheduler/ticket_order.h"

namespace tfdist {

constexpr uint32_t kWorldSet = 0;
constexpr uint32_t kPairFlag = uint32_t{1} << 31;  // ids of sets of two, and no others

// The set {a, b}, a < b < 65536.
uint32_t PairSetId(int a, int b);
// Its ranks; empty: `id` is no set of two of a world of `size` ranks.
std::vector<int32_t> PairSetRanks(uint32_t id, int size);

// "0,2,5" and back. Parsing is for what SetRanksText wrote: a text that it did not write gives an
// empty list.
std::string SetRanksText(const std::vector<int32_t>& ranks);
std::vector<int32_t> ParseSetRanks(const std::string& text);

// The host of each member, from the host of each rank of the world (empty: not known, all on one).
std::vector<int32_t> SetHosts(const std::vector<int32_t>& ranks,
                              const std::vector<int32_t>& host_of);

// Rank 0's list of the agreed sets. Ids are never reused, not even by a later generation of the
// world: an operation that was traced for a set of an earlier world finds that set unknown.
class SetTable {
 public:
  SetTable(int size, uint32_t generation)
      : size_(size), next_id_(((generation & 0x7fff) << 16) + 1) {}
  // The id of the set of these ranks; the same list gives the same id.
  Status Add(const std::string& ranks, uint64_t* id);
  Status Remove(const std::string& id);

 private:
  const int size_;
  uint32_t next_id_;
  std::map<std::string, uint32_t> ids_;  // by list of ranks
};

// `ranks` is empty while this rank has not heard of the set, `index` -1 when it is not in it.
struct ProcessSet : SetView {
  explicit ProcessSet(uint32_t number) : id(number) { index = -1; }

  const uint32_t id;
  bool closing = false;  // this rank has asked to remove it
  bool local = true;     // all of its ranks are on one host

  int leader() const { return ranks[0]; }
  // Whether this rank has joined, and not all have.
  bool HasJoined() const {
    return index >= 0 && joined.count(ranks[static_cast<size_t>(index)]) > 0;
  }
  int IndexOf(int rank) const;  // -1: not one of them
  // " of process set 3 (ranks 0,2)", empty for the world
  std::string Text() const;
  // Counts a submission: gives it the ticket that it has if it is predicted (ticket_order.h).
  void CountSubmission(Request* request);
  // Records whether the ranks have agreed on a submission. `number`: by which its key is predicted
  // from now on; 0: as before.
  void NoteOutcome(const Request& request, bool agreed, uint32_t number);
  bool busy() const { return !idle() || joining != nullptr; }
  bool idle() const {  // but for joining
    return entries.empty() && active.empty() && allocating.empty() && !holding();
  }
  bool holding() const;  // whether the gate holds back a step that has not been committed

  // One group of gradients behind the commit gate. Its steps never overlap: what belongs to a later
  // one waits here until the one before it is released.
  struct GatedGroup {
    int64_t released = 0;
    size_t buckets = 0;                          // of a step
    size_t submitted = 0;                        // of the step under way
    std::vector<std::unique_ptr<Request>> held;  // those of it that have ended
    Status error;                                // the first of them that did not end well
    std::vector<std::unique_ptr<Request>> later;
  };

  struct Active {
    std::unique_ptr<Operation> operation;
    int64_t moved_us = 0;
    int64_t since_us = 0;    // when it began (EngineState::own_us)
    uint64_t agreement = 0;  // predicted: BucketBook::Agreements when it began
  };
  std::unique_ptr<Negotiator> negotiator;       // on the leader
  std::unique_ptr<StallTracker> stall_tracker;  // likewise
  std::unique_ptr<Joins> joins;                 // likewise
  std::unique_ptr<Request> joining;             // kJoin of this rank; sent when it is idle
  std::optional<Response> join_answer;          // all have joined; told when it is idle
  JoinedRanks joined;                           // with this rank, once its kJoin is sent
  std::map<std::string, std::deque<std::unique_ptr<Request>>> entries;  // by key
  using ActiveMap = std::map<Turn, Active>;
  ActiveMap active;
  // By bucket (BucketKey), if it is small: the operation that ran last, to be run again.
  std::map<uint64_t, ActiveMap::node_type> kept;
  std::map<uint64_t, std::unique_ptr<Request>> allocating;  // by ticket
  using Stash = std::map<uint64_t, std::vector<std::pair<int, Arrived>>>;
  Stash stash;                                // by ticket
  Stash::node_type spare_room;                // the last emptied node of `stash`, for reuse
  std::set<uint64_t> copied;                  // tickets whose frames are copied out when they come
  std::map<std::string, std::string> stalls;  // key → last warning
  std::map<std::string, uint32_t> groups;     // id → number
  BucketBook book;
  std::unique_ptr<CommitGate> gate;      // with TFDIST_ATOMIC_STEPS=1
  std::map<uint32_t, GatedGroup> gated;  // by number of the group
  std::set<uint64_t> reported_waits;  // predicted tickets that the leader knows this rank waits for
  std::set<uint64_t> probed;          // those that it asked for before they were submitted here
  // Came before this rank heard of the set.
  std::vector<std::pair<int, RequestInfo>> early;
  std::vector<std::pair<int, std::string>> early_joins;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_PROCESS_SET_H_
