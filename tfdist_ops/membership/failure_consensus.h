// FailureConsensus: the members of a generation agree on one verdict before any of them raises. A
// pure state machine; the protocol and its proof are in docs/design/0004-verdict-and-gate.md.
//
// Every member keeps a set F of failed ranks with evidence; F only grows. Whatever makes it grow
// is told to everybody, together with this member's report: the steps its gate had released when it
// froze. The coordinator of F is the smallest rank outside of F. With the reports of ALL members
// outside of F it proposes a verdict: the one it has itself accepted for an earlier F, else a new
// one. Members with the same F accept; when all have accepted, it is decided, and everybody who
// learns the decision tells everybody else. A decision requires certain evidence for all of F, or a
// majority of the generation outside of F (exactly half is enough if it has the smallest rank).
//
// Source: the protocol is our own. A new coordinator proposes what was accepted before, as in L.
// Lamport, "The Part-Time Parliament", ACM Trans. Computer Systems 16 (1998). Agreement of a
// majority in spite of wrong suspicions: T. D. Chandra, S. Toueg, "Unreliable Failure Detectors for
// Reliable Distributed Systems", J. ACM 43 (1996).
//
// Duties of the caller, all on one thread:
//   - call AddEvidence for what it sees: the monitor's evidence, the end of a link, a deadline;
//     evidence.certain as membership/heartbeat.h says. A new generation's
//     FailureConsensus must be told again of every link that ended before the generation began, and
//     of every entry of the old one's Seen() about a rank that the old verdict counts as a
//     survivor;
//   - a rank that has said goodbye is no failure; but once active(), add it as certain evidence
//     ("it has shut down"), because it will never send a report;
//   - Withdraw(cause) when this rank's own step fails: the others see certain evidence;
//   - give `freeze`: called once, at the first entry of F or at an outcome before that; it must
//     stop the commit gate (CommitGate::Freeze) and return its report;
//   - give `claim`, where ranks can be barred from deciding (Link::BarPeer): called before this
//     rank decides; false when it has been barred;
//   - send TakeMessages() on the control lanes (reliable and in order within a pair), hand what
//     arrives to Receive, and Tick(now_us) about every period; messages first, Tick after them;
//   - hold back every error of a pending operation until outcome() is set, then raise:
//       kDecided    the verdict: the same on every member that decides; resolve the gate with
//                   verdict().commits; the survivors go on with verdict().next_generation
//       kEvicted    the others have decided, or can decide, without this rank: it must not go on
//       kNoMajority too few members are in touch, and not all the others are known to be dead
//       kNotAgreed  no agreement within the bound; the evidence is this rank's own view
//       kWithdrawn  this rank's own failure
//     In the last four the rank has told the others that it is out; it must discard what the gate
//     holds and never act in this generation or a later one;
//   - send what TakeMessages() gives after an outcome before it closes links; messages of a
//     generation that has ended here can be dropped.
#ifndef TFDIST_OPS_MEMBERSHIP_FAILURE_CONSENSUS_H_
#define TFDIST_OPS_MEMBERSHIP_FAILURE_CONSENSUS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "membership/commit.h"
#include "membership/heartbeat.h"

namespace tfdist {

struct Verdict {
  uint32_t generation = 0;       // the one that ended
  uint32_t next_generation = 0;  // of the survivors
  Evidence culprit;              // the first failure
  std::vector<Evidence> others;  // the other failures, in the order of their ranks, without records
  std::vector<int> failed;       // sorted; kNoRank stands for a failure without a failed rank
  std::vector<int> survivors;    // sorted; the first is the next leader
  std::vector<CommitPoint> commits;
};
bool operator==(const Verdict& a, const Verdict& b);

struct ConsensusMessage {
  enum class Kind : uint8_t { kReport = 1, kPropose = 2, kAccept = 3, kDecide = 4 };
  Kind kind = Kind::kReport;
  uint32_t generation = 0;
  std::vector<Evidence> evidence;          // the sender's F, sorted by rank
  std::vector<CommitPoint> commits;        // kReport: released by the sender
  std::shared_ptr<const Verdict> verdict;  // kPropose, kDecide
};

enum class Outcome : uint8_t { kNone, kDecided, kEvicted, kNoMajority, kNotAgreed, kWithdrawn };
const char* OutcomeName(Outcome outcome);

struct ConsensusOptions {
  int64_t period_us = 100 * 1000;       // of Tick
  int64_t no_majority_us = 500 * 1000;  // without a majority; certain evidence may still come
  int64_t bound_us = 6 * 1000 * 1000;   // from the first evidence to some outcome
};
constexpr size_t kMaxCause = 1024;        // bytes; a longer cause is cut off
constexpr size_t kMaxRecord = 16 * 1024;  // bytes; a longer record is not sent at all

// Whether the members outside of `evidence` may decide alone. `members` sorted.
bool MayDecide(const std::vector<int>& members, const std::vector<Evidence>& evidence);

class FailureConsensus {
 public:
  using Message = std::shared_ptr<const ConsensusMessage>;
  using Freeze = std::function<std::vector<CommitPoint>()>;
  using Claim = std::function<bool()>;

  // `members`: sorted, this rank included.
  FailureConsensus(int rank, std::vector<int> members, uint32_t generation, Freeze freeze,
                   const ConsensusOptions& options = {}, Claim claim = nullptr);

  // Takes all evidence of one turn in one call: F as a whole determines who is in the minority.
  void AddEvidence(const std::vector<Evidence>& evidence);
  void Withdraw(const std::string& cause, const std::string& record = "");
  void Receive(int from, const ConsensusMessage& message);
  void Tick(int64_t now_us);

  std::vector<std::pair<int, Message>> TakeMessages() { return std::exchange(messages_, {}); }
  // True from the first evidence on.
  bool active() const { return !failed_.empty() || outcome_ != Outcome::kNone; }
  Outcome outcome() const { return outcome_; }
  // With kDecided.
  const Verdict& verdict() const { return *decided_; }
  // With the other outcomes: why this rank is out.
  const std::string& own_cause() const { return own_cause_; }
  // At any time: the failures that this rank knows of, in the order in which it learned of them.
  std::vector<Evidence> Seen() const;

 private:
  bool IsMember(int rank) const;
  bool Learn(const Evidence& evidence);
  void Changed();  // F or its evidence: tell everybody, start over
  void Merge(int from, const ConsensusMessage& message);
  void End(Outcome outcome, const std::string& cause, const std::string& record = "");
  void Decide(std::shared_ptr<const Verdict> verdict);
  void HandleProposal(int from, const ConsensusMessage& message);
  void TryPropose();
  void TryDecide();
  std::shared_ptr<const Verdict> MakeVerdict() const;
  std::vector<int> Failed() const;  // F
  std::vector<int> Others() const;  // the members outside of F, without this rank
  int Coordinator() const;
  std::shared_ptr<ConsensusMessage> NewMessage(ConsensusMessage::Kind kind) const;
  void Broadcast(const Message& message);
  void FreezeOnce();

  const int rank_;
  const std::vector<int> members_;
  const uint32_t generation_;
  const Freeze freeze_;
  const Claim claim_;
  const ConsensusOptions options_;

  std::map<int, Evidence> failed_;  // F
  std::vector<int> order_;          // F in the order in which it was learnt
  bool frozen_ = false;
  std::vector<CommitPoint> commits_;                 // the frozen gate
  std::shared_ptr<const Verdict> accepted_;          // the last one
  std::map<int, std::vector<CommitPoint>> reports_;  // of the others
  // The coordinator's, for its present F.
  std::shared_ptr<const Verdict> proposed_;
  std::vector<int> proposed_for_;
  std::set<int> accepts_;

  Outcome outcome_ = Outcome::kNone;
  std::shared_ptr<const Verdict> decided_;
  std::string own_cause_;
  OwnTime own_;
  int64_t since_first_us_ = 0;
  int64_t minority_us_ = 0;  // for how long F may not decide
  std::vector<std::pair<int, Message>> messages_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_MEMBERSHIP_FAILURE_CONSENSUS_H_
