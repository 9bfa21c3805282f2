// Invariants of a simulated world: checked whenever a rank releases a step or ends a generation,
// and at the end.
#include <algorithm>
#include <sstream>

#include "membership_sim.h"

namespace tfdist::sim {

std::string Text(const Verdict& verdict) {
  std::ostringstream out;
  out << "verdict of generation " << verdict.generation << ": culprit " << verdict.culprit.rank
      << " (" << verdict.culprit.cause << "), failed";
  for (int rank : verdict.failed) out << ' ' << rank;
  out << ", commits";
  for (const CommitPoint& point : verdict.commits) out << ' ' << point.group << ':' << point.step;
  return out.str();
}

void MembershipSim::CheckRelease(const Node& node, const CommitPoint& point) {
  Node& self = At(node.rank);
  const uint32_t id = node.now.id;
  self.applied[point.group].push_back({id, point.step});
  self.last_applied_us = queue_.now_us();
  for (int member : node.now.members) {
    Generation& other = At(member).now;
    // A member that has gone on to a later generation has resolved this one.
    if (other.id > id) continue;
    if (other.id < id || other.complete[point.group] < point.step) {
      Violation("rank " + std::to_string(node.rank) + " applies step " +
                std::to_string(point.step) + " of group " + std::to_string(point.group) +
                ", which rank " + std::to_string(member) + " has not completed");
    }
  }
  if (!node.finished) StartStep(&self, point.group);
}

void MembershipSim::CheckVerdict(const Node& node, const Verdict& verdict) {
  bool first = true;
  for (const Node& other : nodes_) {
    const auto it = other.decided.find(verdict.generation);
    if (it == other.decided.end()) continue;
    first = false;
    if (other.state == State::kDead || *it->second == verdict) continue;
    Violation("ranks " + std::to_string(node.rank) + " and " + std::to_string(other.rank) +
              " decided differently: " + Text(verdict) + " / " + Text(*it->second));
  }
  if (first) ++result_.verdicts;
  if (slow_only_) Violation("a verdict although nothing failed: " + Text(verdict));
}

void MembershipSim::CheckSuspicion(const Node& node, int peer) {
  const Node& other = At(peer);
  if (other.state != State::kRuns || other.finished) return;
  // It can have ended this generation, or not have reached it.
  if (other.now.id != node.now.id || other.decided.count(node.now.id) > 0) return;
  const int64_t since_us = queue_.now_us() - 4 * kSecond;
  // Cut in either direction: whose beats are not acknowledged stops sending them.
  const auto cut = cut_us_.find({peer, node.rank});
  if (wires_->IsCut(peer, node.rank) || wires_->IsCut(node.rank, peer)) return;
  if (cut != cut_us_.end() && cut->second > since_us) return;
  if (disturbed_us_[static_cast<size_t>(peer)] > since_us) return;
  if (node.ended.count(peer) > 0) return;
  if (size_ > 8) return;  // a step that misses its deadline because of a cut between other ranks
  Violation("rank " + std::to_string(node.rank) + " suspects rank " + std::to_string(peer) +
            ", which runs and is in touch");
}

void MembershipSim::CheckOutcome(const Node& node) {
  const Outcome outcome = node.now.consensus->outcome();
  if (outcome == Outcome::kWithdrawn) return;
  if (slow_only_) Violation("rank " + std::to_string(node.rank) + " ended although nothing failed");
  // On one host every failure is certain: a stopped rank is barred, unless it has decided, in this
  // generation or in the one before, what was seen in which counts here too.
  const bool all_certain = std::none_of(nodes_.begin(), nodes_.end(), [&node](const Node& other) {
    return std::any_of(other.barred.begin(), other.barred.end(), [&node](const auto& claim) {
      return claim.first + 1 >= node.now.id && claim.first <= node.now.id && !claim.second;
    });
  });
  if (outcome == Outcome::kNoMajority && hosts_ == 1 && all_certain) {
    Violation("rank " + std::to_string(node.rank) + " is without a majority on one host");
  }
  if (undisturbed_ && outcome == Outcome::kNotAgreed) {
    Violation("rank " + std::to_string(node.rank) + " came to no agreement in an orderly world");
  }
  if (undisturbed_ && !uncertain_) {
    Violation("rank " + std::to_string(node.rank) + " ended with \"" + OutcomeName(outcome) +
              "\" although all failures were certain");
  }
}

// In a large world not everybody watches everybody: a broken link between two members may be
// waiting for a step's deadline.
bool MembershipSim::LinkDown(const std::vector<int>& members) {
  if (size_ <= 8) return false;
  for (int a : members) {
    for (int b : members) {
      if (a != b && (wires_->IsCut(a, b) || wires_->IsClosed(a, b))) return true;
    }
  }
  return false;
}

void MembershipSim::CheckEnd() {
  const Node* reference = nullptr;
  for (Node& node : nodes_) {
    if (!Live(node)) continue;
    const std::string name = "rank " + std::to_string(node.rank);
    if (!node.inbox.empty() || !node.early.empty()) Violation(name + " has unread messages");
    if (node.now.consensus->active()) Violation(name + " waits for an agreement at the end");
    const bool waits = LinkDown(node.now.members);
    if (node.now.gate->waiting() > 0 && !waits) Violation(name + " holds steps at the end");
    for (int member : node.now.members) {
      if (!Live(At(member)) || At(member).now.id != node.now.id) {
        Violation(name + " goes on in generation " + std::to_string(node.now.id) + " with rank " +
                  std::to_string(member) + ", which is not in it");
      }
    }
    if (node.last_applied_us < queue_.now_us() - 4 * kSecond && !waits)
      Violation(name + " does not step on");
    if (reference == nullptr) {
      reference = &node;
    } else if (node.now.id != reference->now.id || node.now.members != reference->now.members) {
      Violation(name + " and rank " + std::to_string(reference->rank) + " go on apart");
    } else if (node.applied != reference->applied) {
      Violation(name + " and rank " + std::to_string(reference->rank) +
                " have not applied the same steps");
    }
  }
  int64_t last_us = -1;
  for (int rank : expect_decided_) {
    if (At(rank).decided.count(1) == 0) {
      Violation("rank " + std::to_string(rank) + " has no verdict about the " +
                result_.single_fault);
    }
    last_us = std::max(last_us, At(rank).outcome_us);
  }
  if (single_us_ >= 0 && last_us >= 0) result_.detection_us = last_us - single_us_;
}

}  // namespace tfdist::sim
