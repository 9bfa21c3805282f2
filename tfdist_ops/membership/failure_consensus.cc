#include "membership/failure_consensus.h"

#include <algorithm>
#include <iterator>

namespace tfdist {
namespace {

std::vector<int> Ranks(const std::vector<Evidence>& evidence) {
  std::vector<int> ranks;
  for (const Evidence& item : evidence) ranks.push_back(item.rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

bool Contains(const std::vector<int>& sorted, int rank) {
  return std::binary_search(sorted.begin(), sorted.end(), rank);
}

std::vector<int> Without(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> rest;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(rest));
  return rest;
}

}  // namespace

const char* OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kNone:
      return "none";
    case Outcome::kDecided:
      return "decided";
    case Outcome::kEvicted:
      return "evicted";
    case Outcome::kNoMajority:
      return "no majority";
    case Outcome::kNotAgreed:
      return "not agreed";
    case Outcome::kWithdrawn:
      return "withdrawn";
  }
  return "";
}

bool operator==(const Verdict& a, const Verdict& b) {
  return a.generation == b.generation && a.next_generation == b.next_generation &&
         a.culprit.rank == b.culprit.rank && a.culprit.certain == b.culprit.certain &&
         a.culprit.cause == b.culprit.cause && a.culprit.record == b.culprit.record &&
         std::equal(a.others.begin(), a.others.end(), b.others.begin(), b.others.end(),
                    [](const Evidence& x, const Evidence& y) {
                      return x.rank == y.rank && x.certain == y.certain && x.cause == y.cause;
                    }) &&
         a.failed == b.failed && a.survivors == b.survivors && a.commits == b.commits;
}

bool MayDecide(const std::vector<int>& members, const std::vector<Evidence>& evidence) {
  bool all_certain = true;
  for (const Evidence& item : evidence) {
    if (item.rank != kNoRank && !item.certain) all_certain = false;
  }
  if (all_certain) return true;
  const std::vector<int> survivors = Without(members, Ranks(evidence));
  const size_t twice = 2 * survivors.size();
  if (twice == members.size()) return survivors.front() == members.front();
  return twice > members.size();
}

FailureConsensus::FailureConsensus(int rank, std::vector<int> members, uint32_t generation,
                                   Freeze freeze, const ConsensusOptions& options, Claim claim)
    : rank_(rank),
      members_(std::move(members)),
      generation_(generation),
      freeze_(std::move(freeze)),
      claim_(std::move(claim)),
      options_(options),
      own_(options.period_us) {}

bool FailureConsensus::IsMember(int rank) const { return Contains(members_, rank); }

std::vector<int> FailureConsensus::Failed() const {
  std::vector<int> ranks;
  for (const auto& [rank, evidence] : failed_) ranks.push_back(rank);
  return ranks;
}

std::vector<int> FailureConsensus::Others() const {
  std::vector<int> others = Without(members_, Failed());
  others.erase(std::remove(others.begin(), others.end(), rank_), others.end());
  return others;
}

int FailureConsensus::Coordinator() const {
  for (int rank : members_) {
    if (failed_.count(rank) == 0) return rank;
  }
  return kNoRank;
}

std::vector<Evidence> FailureConsensus::Seen() const {
  std::vector<Evidence> seen;
  for (int rank : order_) seen.push_back(failed_.at(rank));
  return seen;
}

// ---- messages ----

std::shared_ptr<ConsensusMessage> FailureConsensus::NewMessage(ConsensusMessage::Kind kind) const {
  auto message = std::make_shared<ConsensusMessage>();
  message->kind = kind;
  message->generation = generation_;
  for (const auto& [rank, evidence] : failed_) message->evidence.push_back(evidence);
  return message;
}

// Those in F are told too: that is how a rank that only seemed dead learns that it is out.
void FailureConsensus::Broadcast(const Message& message) {
  for (int peer : members_) {
    if (peer != rank_) messages_.push_back({peer, message});
  }
}

// ---- evidence ----

void FailureConsensus::FreezeOnce() {
  if (frozen_) return;
  frozen_ = true;
  commits_ = freeze_();
}

// True when it is new. Evidence never goes away; it can only become certain.
bool FailureConsensus::Learn(const Evidence& evidence) {
  if (evidence.rank != kNoRank && !IsMember(evidence.rank)) return false;
  FreezeOnce();
  const auto [it, added] = failed_.emplace(evidence.rank, evidence);
  if (added) {
    order_.push_back(evidence.rank);
  } else if (!evidence.certain || it->second.certain) {
    return false;
  } else {
    it->second.certain = true;  // the first cause stays
  }
  it->second.cause = Shortened(it->second.cause, kMaxCause);
  if (it->second.record.size() > kMaxRecord) it->second.record.clear();
  return true;
}

void FailureConsensus::Changed() {
  // A proposal for a smaller F is abandoned; an accepted one stays.
  if (proposed_for_ != Failed()) {
    proposed_.reset();
    accepts_.clear();
  }
  auto report = NewMessage(ConsensusMessage::Kind::kReport);
  report->commits = commits_;
  Broadcast(report);
  TryPropose();
}

void FailureConsensus::AddEvidence(const std::vector<Evidence>& evidence) {
  if (outcome_ != Outcome::kNone) return;
  bool changed = false;
  for (const Evidence& item : evidence) {
    if (item.rank != rank_) changed |= Learn(item);
  }
  if (changed) Changed();
}

void FailureConsensus::Withdraw(const std::string& cause, const std::string& record) {
  if (outcome_ == Outcome::kNone) End(Outcome::kWithdrawn, cause, record);
}

// Every end but a decision: this rank is out, and says so.
void FailureConsensus::End(Outcome outcome, const std::string& cause, const std::string& record) {
  FreezeOnce();
  outcome_ = outcome;
  own_cause_ = cause;
  auto message = NewMessage(ConsensusMessage::Kind::kReport);
  message->evidence = {
      Evidence{rank_, true, Shortened(cause, kMaxCause), record.size() > kMaxRecord ? "" : record}};
  Broadcast(message);
  reports_.clear();
}

void FailureConsensus::Receive(int from, const ConsensusMessage& message) {
  if (message.generation != generation_ || !IsMember(from) || from == rank_) return;
  if (outcome_ != Outcome::kNone) return;
  if (message.kind == ConsensusMessage::Kind::kDecide) {
    if (message.verdict == nullptr) return;
    if (Contains(message.verdict->survivors, rank_)) {
      Decide(message.verdict);
    } else {
      End(Outcome::kEvicted, "the others decided without this rank");
    }
    return;
  }
  Merge(from, message);
  if (outcome_ != Outcome::kNone || failed_.count(from) > 0) return;
  HandleProposal(from, message);
}

void FailureConsensus::Merge(int from, const ConsensusMessage& message) {
  const std::vector<int> told = Ranks(message.evidence);
  if (Contains(told, from)) {  // it says that it is out: nothing else it says counts
    for (const Evidence& item : message.evidence) {
      if (item.rank == from && item.certain && Learn(item)) Changed();
    }
    return;
  }
  if (failed_.count(from) > 0) return;
  if (Contains(told, rank_)) {
    if (MayDecide(members_, message.evidence)) {
      const auto own = std::find_if(message.evidence.begin(), message.evidence.end(),
                                    [this](const Evidence& item) { return item.rank == rank_; });
      End(Outcome::kEvicted,
          "it was reported as failed by rank " + std::to_string(from) + ": " + own->cause);
    } else if (Learn({from, false, "it is in touch with less than half of the ranks"})) {
      Changed();
    }
    return;
  }
  bool changed = false;
  for (const Evidence& item : message.evidence) changed |= Learn(item);
  // A gate freezes once: every report of a member says the same about it.
  if (message.kind == ConsensusMessage::Kind::kReport) reports_[from] = message.commits;
  if (changed) {
    Changed();
  } else {
    TryPropose();
  }
}

// ---- agreement ----

void FailureConsensus::HandleProposal(int from, const ConsensusMessage& message) {
  if (Ranks(message.evidence) != Failed()) return;
  if (message.kind == ConsensusMessage::Kind::kPropose && message.verdict != nullptr) {
    if (from != Coordinator()) return;
    accepted_ = message.verdict;
    messages_.push_back({from, NewMessage(ConsensusMessage::Kind::kAccept)});
  } else if (message.kind == ConsensusMessage::Kind::kAccept && proposed_ != nullptr) {
    accepts_.insert(from);
    TryDecide();
  }
}

void FailureConsensus::TryPropose() {
  if (outcome_ != Outcome::kNone || proposed_ != nullptr || failed_.empty()) return;
  if (Coordinator() != rank_ || !MayDecide(members_, Seen())) return;
  const std::vector<int> others = Others();
  for (int peer : others) {
    if (reports_.count(peer) == 0) return;
  }
  // If anything was decided before, this rank has accepted it (docs/design/0004).
  proposed_ = accepted_ != nullptr ? accepted_ : MakeVerdict();
  proposed_for_ = Failed();
  accepted_ = proposed_;
  accepts_ = {rank_};
  auto message = NewMessage(ConsensusMessage::Kind::kPropose);
  message->verdict = proposed_;
  for (int peer : others) messages_.push_back({peer, message});
  TryDecide();
}

std::shared_ptr<const Verdict> FailureConsensus::MakeVerdict() const {
  auto verdict = std::make_shared<Verdict>();
  verdict->generation = generation_;
  verdict->next_generation = generation_ + 1;
  verdict->culprit = failed_.at(order_.front());
  for (const auto& [rank, evidence] : failed_) {
    if (rank == kNoRank || rank == verdict->culprit.rank) continue;
    verdict->others.push_back({rank, evidence.certain, evidence.cause});
  }
  verdict->failed = Failed();
  verdict->survivors = Without(members_, verdict->failed);
  std::map<uint64_t, int64_t> last;
  for (const CommitPoint& point : commits_) last[point.group] = point.step;
  for (int peer : Others()) {
    for (const CommitPoint& point : reports_.at(peer)) {
      int64_t& step = last[point.group];
      step = std::max(step, point.step);
    }
  }
  for (const auto& [group, step] : last) verdict->commits.push_back({group, step});
  return verdict;
}

void FailureConsensus::TryDecide() {
  for (int peer : Others()) {
    if (accepts_.count(peer) == 0) return;
  }
  Decide(proposed_);
}

void FailureConsensus::Decide(std::shared_ptr<const Verdict> verdict) {
  if (claim_ && !claim_()) {
    End(Outcome::kEvicted, "the others decided without this rank while it was stopped");
    return;
  }
  FreezeOnce();
  outcome_ = Outcome::kDecided;
  decided_ = std::move(verdict);
  auto message = NewMessage(ConsensusMessage::Kind::kDecide);
  message->verdict = decided_;
  Broadcast(message);
  reports_.clear();
}

// ---- time ----

void FailureConsensus::Tick(int64_t now_us) {
  const int64_t passed_us = own_.Advance(now_us);
  if (outcome_ != Outcome::kNone || failed_.empty()) return;
  since_first_us_ += passed_us;
  minority_us_ = MayDecide(members_, Seen()) ? 0 : minority_us_ + passed_us;
  if (minority_us_ >= options_.no_majority_us) {
    End(Outcome::kNoMajority,
        "it is in touch with too few ranks to go on: " + std::to_string(Others().size() + 1) +
            " of " + std::to_string(members_.size()));
  } else if (since_first_us_ >= options_.bound_us) {
    End(Outcome::kNotAgreed, "the ranks came to no agreement about a failure");
  }
}

}  // namespace tfdist
