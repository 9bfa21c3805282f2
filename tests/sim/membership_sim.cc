#include "membership_sim.h"

#include <algorithm>
#include <cstdio>

namespace tfdist::sim {
namespace {

constexpr int64_t kPeriodUs = 100 * kMs;
// Of a step; where ranks are only slow, it is long.
constexpr int64_t kDeadlineUs = 8 * kSecond;
constexpr int64_t kLongDeadlineUs = 100 * kSecond;

std::string Text(const std::vector<Evidence>& evidence) {
  std::string text = "{";
  for (const Evidence& item : evidence) {
    text += ' ' + std::to_string(item.rank) + (item.certain ? "!" : "?");
  }
  return text + " }";
}

}  // namespace

MembershipSim::MembershipSim(uint64_t seed, bool trace) : rng_(seed), tracing_(trace) {
  size_ = static_cast<int>(rng_.Between(2, 8));
  if (rng_.Chance(2)) size_ = static_cast<int>(rng_.Between(9, rng_.Chance(20) ? 64 : 20));
  hosts_ = rng_.Chance(35) ? 1 : static_cast<int>(rng_.Between(2, std::min(size_, 5)));
  groups_ = rng_.Chance(40) ? 2 : 1;
  launcher_ = rng_.Chance(40);
  wires_ = std::make_unique<Wires<Letter>>(
      size_, &queue_, &rng_,
      [this](int from, int to, const Letter& letter) { Arrive(from, to, letter); });
  if (rng_.Chance(30)) wires_->SetDuplicates(5);
  const bool jitter = rng_.Chance(25);
  nodes_.resize(static_cast<size_t>(size_));
  disturbed_us_.assign(static_cast<size_t>(size_), -kSecond * 1000);
  std::vector<int> members;
  for (int r = 0; r < size_; ++r) {
    At(r).rank = r;
    At(r).host = r * hosts_ / size_;
    members.push_back(r);
  }
  for (int a = 0; a < size_; ++a) {
    for (int b = 0; b < size_; ++b) {
      const bool local = At(a).host == At(b).host;
      wires_->SetDelay(a, b, {20, jitter ? 20 * kMs : local ? 200 : 2 * kMs});
    }
  }
  Trace(std::to_string(size_) + " ranks on " + std::to_string(hosts_) + " hosts, " +
        std::to_string(groups_) + " groups" + (launcher_ ? ", a launcher" : ""));
  for (Node& node : nodes_) {
    Enter(&node, 1, members);
    ScheduleTick(node.rank);
  }
  Plan();
}

MembershipResult MembershipSim::Run() {
  const int64_t end_us = last_fault_us_ + (size_ > 8 ? 28 : 13) * kSecond;
  queue_.RunUntil(end_us - kSecond);
  quiet_ = true;
  queue_.RunUntil(end_us);
  if (result_.violation.empty()) CheckEnd();
  for (const Node& node : nodes_) {
    if (node.applied.count(0) > 0) {
      result_.steps = std::max<int64_t>(result_.steps, node.applied.at(0).size());
    }
  }
  return std::move(result_);
}

// ---- generations and steps ----

void MembershipSim::Enter(Node* node, uint32_t id, const std::vector<int>& members) {
  if (node->state == State::kDead) return;
  Generation next;
  next.id = id;
  next.members = members;
  std::vector<bool> same_host;
  for (int member : members) same_host.push_back(At(member).host == node->host);
  next.monitor = std::make_unique<HeartbeatMonitor>(node->rank, members, same_host);
  next.gate = std::make_unique<CommitGate>(node->rank, members);
  CommitGate* gate = next.gate.get();
  next.consensus = std::make_unique<FailureConsensus>(
      node->rank, members, id, [gate] { return gate->Freeze(); }, ConsensusOptions(),
      [node, id] { return !node->barred.emplace(id, false).first->second; });
  std::vector<Evidence> known;
  for (const auto& [peer, certain] : node->ended) known.push_back({peer, certain, "link ended"});
  if (id > 1) {
    for (const Evidence& seen : node->now.consensus->Seen()) {
      if (seen.rank != kNoRank) known.push_back(seen);
    }
    Trace("rank " + std::to_string(node->rank) + " enters generation " + std::to_string(id));
  }
  node->now = std::move(next);
  node->now.consensus->AddEvidence(known);
  for (int g = 0; g < groups_; ++g) StartStep(node, static_cast<uint64_t>(g));
  Flow(node);
  for (auto& [from, letter] : std::exchange(node->early, {})) {
    if (node->state != State::kDead) Handle(node, from, letter);
  }
}

void MembershipSim::StartStep(Node* node, uint64_t group) {
  if (quiet_ || node->decided.count(node->now.id) > 0) return;
  Generation& now = node->now;
  const int64_t step = ++now.running[group];
  now.started_us[group] = queue_.now_us();
  Letter letter;
  letter.kind = Letter::Kind::kCompute;
  letter.generation = now.id;
  letter.group = group;
  letter.step = step;
  const int rank = node->rank;
  // Long after the last fault nothing depends on the pace; slow steps are quicker to simulate.
  const bool fast = queue_.now_us() < last_fault_us_ + kSecond;
  const int64_t compute_us =
      fast ? rng_.Between(5 * kMs, 60 * kMs) : rng_.Between(100 * kMs, 400 * kMs);
  queue_.After(compute_us, [this, rank, letter] { Arrive(rank, rank, letter); });
}

void MembershipSim::Contribute(Node* node, uint64_t group, int64_t step) {
  Letter letter;
  letter.kind = Letter::Kind::kData;
  letter.group = group;
  letter.step = step;
  for (int peer : node->now.members) {
    if (peer != node->rank) Send(node, peer, letter);
  }
  if (node->state != State::kDead) NoteContribution(node, node->rank, group, step);
}

void MembershipSim::NoteContribution(Node* node, int from, uint64_t group, int64_t step) {
  Generation& now = node->now;
  std::set<int>& all = now.contributed[{group, step}];
  all.insert(from);
  if (all.size() < now.members.size() || now.complete[group] >= step) return;
  now.complete[group] = step;
  const Status status = now.gate->Complete(group, step);
  if (!status.ok()) Violation("gate: " + status.message());
  now.contributed.erase({group, step});
  Flow(node);
}

// ---- messages ----

void MembershipSim::Send(Node* node, int to, Letter letter) {
  if (node->state == State::kDead) return;
  if (letter.generation == 0) letter.generation = node->now.id;
  if (node->state == State::kStopped) {  // in the middle of something
    node->outbox.push_back({to, letter});
    return;
  }
  const bool agreement = letter.kind == Letter::Kind::kConsensus;
  const bool counted =
      node->armed_kind == 0
          ? agreement || letter.kind == Letter::Kind::kGate
          : agreement && static_cast<int>(letter.message->kind) == node->armed_kind;
  if (counted && node->armed_sends > 0 && --node->armed_sends == 0) {
    Spring(node, to, letter);
    return;
  }
  wires_->Send(node->rank, to, letter);
}

void MembershipSim::Arrive(int from, int to, const Letter& letter) {
  Node* node = &At(to);
  if (node->state == State::kDead) return;
  if (Asleep(*node)) {
    node->inbox.push_back({from, letter});
  } else {
    Handle(node, from, letter);
  }
}

void MembershipSim::Handle(Node* node, int from, const Letter& letter) {
  if (letter.kind == Letter::Kind::kEnd || letter.kind == Letter::Kind::kGone) {
    bool& certain = node->ended[from];
    certain |= letter.certain;
    if (node->finished) return;
    node->now.consensus->AddEvidence(
        {{from, letter.certain,
          letter.kind == Letter::Kind::kEnd ? "its connection ended" : "its process has ended"}});
    Flow(node);
    return;
  }
  if (node->finished) return;
  Generation& now = node->now;
  if (letter.generation > now.id) {
    node->early.push_back({from, letter});
    return;
  }
  if (letter.generation < now.id) return;
  now.monitor->OnFrame(from);
  const bool over = node->decided.count(now.id) > 0;
  switch (letter.kind) {
    case Letter::Kind::kBeat:
      now.monitor->Receive(from, letter.beat);
      now.beats_read[from] = std::max(now.beats_read[from], letter.beat.sequence);
      return;
    case Letter::Kind::kConsensus:
      if (tracing_) {
        static const char* const kNames[] = {"", "report", "proposal", "accept", "decision"};
        Trace("rank " + std::to_string(node->rank) + " reads a " +
              kNames[static_cast<int>(letter.message->kind)] + " of rank " + std::to_string(from) +
              ", F " + Text(letter.message->evidence));
      }
      now.consensus->Receive(from, *letter.message);
      break;
    case Letter::Kind::kGate:
      now.gate->Receive(from, letter.gate);
      break;
    case Letter::Kind::kData:
      if (!over) NoteContribution(node, from, letter.group, letter.step);
      return;
    case Letter::Kind::kCompute:
      if (!over) Contribute(node, letter.group, letter.step);
      return;
    case Letter::Kind::kEnd:
    case Letter::Kind::kGone:
      return;
  }
  Flow(node);
}

void MembershipSim::Flow(Node* node) {
  if (node->finished || node->state == State::kDead) return;
  Generation& now = node->now;
  // The own freeze can have happened at any input.
  for (const CommitPoint& point : now.gate->TakeReleased()) CheckRelease(*node, point);
  for (auto& [peer, message] : now.gate->TakeMessages()) {
    Letter letter;
    letter.kind = Letter::Kind::kGate;
    letter.gate = message;
    Send(node, peer, letter);
  }
  for (auto& [peer, message] : now.consensus->TakeMessages()) {
    // Each member's set grows, or becomes certain, at most once for every other; then an end.
    if (++now.agreement_messages > 4 * size_ * size_ + 4 * size_) {
      Violation("rank " + std::to_string(node->rank) + " never stops to send reports");
      return;
    }
    Letter letter;
    letter.kind = Letter::Kind::kConsensus;
    letter.message = message;
    Send(node, peer, letter);
  }
  if (now.consensus->active()) now.monitor->WatchAll();
  if (now.consensus->outcome() != Outcome::kNone && node->decided.count(now.id) == 0 &&
      node->state != State::kDead) {
    Finish(node);
  }
}

// A generation ends for a rank.
void MembershipSim::Finish(Node* node) {
  Generation& now = node->now;
  const Outcome outcome = now.consensus->outcome();
  ++result_.outcomes[static_cast<int>(outcome)];
  if (now.id == 1) node->outcome_us = queue_.now_us();
  if (outcome == Outcome::kDecided) {
    const Verdict& verdict = now.consensus->verdict();
    Trace("rank " + std::to_string(node->rank) + " decided: " + Text(verdict));
    CheckVerdict(*node, verdict);
    node->decided[now.id] = std::make_shared<Verdict>(verdict);
    const Status status = now.gate->Resolve(verdict.commits);
    if (!status.ok()) Violation("rank " + std::to_string(node->rank) + ": " + status.message());
    for (const CommitPoint& point : now.gate->TakeReleased()) CheckRelease(*node, point);
    const int rank = node->rank;
    const uint32_t next = verdict.next_generation;
    const std::vector<int> survivors = verdict.survivors;
    queue_.After(rng_.Between(0, 5 * kMs), [this, rank, next, survivors] {
      if (!At(rank).finished) Enter(&At(rank), next, survivors);
    });
    return;
  }
  Trace("rank " + std::to_string(node->rank) + " ends: " + OutcomeName(outcome) + ", " +
        now.consensus->own_cause());
  CheckOutcome(*node);
  node->finished = true;
  node->inbox.clear();
  node->early.clear();
  const int rank = node->rank;
  queue_.After(rng_.Between(0, 2 * kSecond), [this, rank] { Kill(&At(rank), false); });
}

// ---- time ----

void MembershipSim::ScheduleTick(int rank) {
  queue_.After(kPeriodUs + rng_.Between(0, 10 * kMs), [this, rank] {
    Node* node = &At(rank);
    if (node->state == State::kDead) return;
    if (Asleep(*node)) {
      node->tick_due = true;
      return;
    }
    Tick(node);
    ScheduleTick(rank);
  });
}

void MembershipSim::Wake(Node* node) {
  if (Asleep(*node)) return;
  // A rank can be stopped between reading its messages and looking at the clock.
  const bool tick_first = rng_.Chance(50);
  const bool due = std::exchange(node->tick_due, false);
  for (auto& [to, letter] : std::exchange(node->outbox, {})) Send(node, to, letter);
  if (due && tick_first) Tick(node);
  while (!node->inbox.empty() && !Asleep(*node)) {
    auto [from, letter] = std::move(node->inbox.front());
    node->inbox.pop_front();
    Handle(node, from, letter);
  }
  if (due && !tick_first && !Asleep(*node)) Tick(node);
  if (due) ScheduleTick(node->rank);
}

void MembershipSim::Tick(Node* node) {
  if (node->finished || node->state != State::kRuns) return;
  Generation& now = node->now;
  for (int peer : now.monitor->WantProcessState()) {
    now.monitor->SetProcessState(peer, StateOf(At(peer)));
  }
  HeartbeatMonitor::Turn turn = now.monitor->Tick(queue_.now_us());
  for (const auto& [peer, beat] : turn.beats) {
    Letter letter;
    letter.kind = Letter::Kind::kBeat;
    letter.beat = beat;
    const Node& other = At(peer);
    const auto read = other.now.id == now.id && other.now.beats_read.count(node->rank) > 0
                          ? other.now.beats_read.at(node->rank)
                          : 0;
    if (other.now.id == now.id && beat.sequence > read + 4) {
      Violation("rank " + std::to_string(node->rank) + " has sent " +
                std::to_string(beat.sequence - read) + " beats that rank " + std::to_string(peer) +
                " has not read");
    }
    Send(node, peer, letter);
  }
  Suspect(node, turn.evidence);
  CheckDeadlines(node);
  now.consensus->Tick(queue_.now_us());
  Flow(node);
}

void MembershipSim::Suspect(Node* node, std::vector<Evidence> evidence) {
  for (Evidence& item : evidence) {
    Node& other = At(item.rank);
    if (other.host == node->host && other.state == State::kStopped) {
      item.certain |= other.barred.emplace(node->now.id, true).first->second;
    }
    Trace("rank " + std::to_string(node->rank) + " sees of rank " + std::to_string(item.rank) +
          ": " + item.cause);
    CheckSuspicion(*node, item.rank);
  }
  node->now.consensus->AddEvidence(evidence);
}

void MembershipSim::CheckDeadlines(Node* node) {
  Generation& now = node->now;
  if (quiet_ || now.consensus->active()) return;
  for (const auto& [group, started_us] : now.started_us) {
    const int64_t late_us =
        queue_.now_us() - started_us - (slow_only_ ? kLongDeadlineUs : kDeadlineUs);
    if (late_us < 0) continue;
    const std::set<int>& came = now.contributed[{group, now.running[group]}];
    const bool complete = now.complete[group] >= now.running[group];
    if (complete && late_us > kSecond) {
      now.consensus->AddEvidence({{kNoRank, true, "a step was not committed in time"}});
      return;
    }
    if (complete) continue;
    std::vector<Evidence> missing;
    for (int member : now.members) {
      if (came.count(member) == 0 && member != node->rank) {
        missing.push_back({member, false, "it did not come within the deadline"});
      }
    }
    Suspect(node, missing);
  }
}

ProcessState MembershipSim::StateOf(const Node& node) const {
  switch (node.state) {
    case State::kRuns:
      return ProcessState::kRunning;
    case State::kStopped:
      return ProcessState::kStopped;
    case State::kDead:
      return ProcessState::kGone;
  }
  return ProcessState::kUnknown;
}

void MembershipSim::Violation(const std::string& text) {
  Trace("VIOLATION " + text);
  if (!result_.violation.empty()) return;
  result_.violation = text;
}

void MembershipSim::Trace(const std::string& text) {
  if (!tracing_) return;
  char time[32];
  std::snprintf(time, sizeof(time), "%10.4f  ", static_cast<double>(queue_.now_us()) / 1e6);
  result_.trace.push_back(time + text);
}

}  // namespace tfdist::sim
