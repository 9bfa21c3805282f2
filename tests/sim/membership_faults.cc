// Faults in a simulated world, and when they happen.
#include <algorithm>

#include "membership_sim.h"

namespace tfdist::sim {

void MembershipSim::Kill(Node* node, bool silent) {
  if (node->state == State::kDead) return;
  Trace("rank " + std::to_string(node->rank) + (silent ? " vanishes" : " dies"));
  node->state = State::kDead;
  node->inbox.clear();
  node->early.clear();
  last_fault_us_ = std::max(last_fault_us_, queue_.now_us());
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == node->rank) continue;
    // The system closes the sockets of a process that ends; a host that loses power closes nothing.
    Letter end;
    end.kind = Letter::Kind::kEnd;
    end.certain = At(peer).host == node->host;
    if (!silent) wires_->Send(node->rank, peer, end);
    wires_->Close(node->rank, peer);
    if (silent || !launcher_) continue;
    Letter gone = end;
    gone.kind = Letter::Kind::kGone;
    gone.certain = true;
    const int dead = node->rank;
    queue_.After(rng_.Between(5 * kMs, 300 * kMs),
                 [this, dead, peer, gone] { Arrive(dead, peer, gone); });
  }
}

void MembershipSim::Stop(Node* node) {
  if (node->state != State::kRuns) return;
  Trace("rank " + std::to_string(node->rank) + " is stopped");
  node->state = State::kStopped;
  Disturbed(node->rank) = queue_.now_us();
}

void MembershipSim::Continue(Node* node) {
  if (node->state != State::kStopped) return;
  Trace("rank " + std::to_string(node->rank) + " continues");
  node->state = State::kRuns;
  Disturbed(node->rank) = queue_.now_us();
  last_fault_us_ = std::max(last_fault_us_, queue_.now_us());
  Wake(node);
}

void MembershipSim::StopAt(int rank, int64_t at_us, int64_t continue_us) {
  undisturbed_ = false;
  queue_.At(at_us, [this, rank] { Stop(&At(rank)); });
  if (continue_us < 0) return;
  last_fault_us_ = std::max(last_fault_us_, continue_us);
  queue_.At(continue_us, [this, rank] { Continue(&At(rank)); });
}

// The rank is starved: it runs nothing, but its process is not stopped.
void MembershipSim::StallAt(int rank, int64_t at_us, int64_t length_us) {
  undisturbed_ = false;
  last_fault_us_ = std::max(last_fault_us_, at_us + length_us);
  queue_.At(at_us, [this, rank, length_us] {
    Trace("rank " + std::to_string(rank) + " is starved");
    At(rank).stalled_until_us = queue_.now_us() + length_us;
    queue_.After(length_us, [this, rank] {
      if (At(rank).state == State::kRuns) Wake(&At(rank));
    });
  });
}

// Everything is suspended and continued: a laptop that sleeps, SIGSTOP to the whole job.
void MembershipSim::FreezeJob(int64_t at_us, int64_t length_us) {
  for (int r = 0; r < size_; ++r) {
    StopAt(r, at_us + rng_.Between(0, 20 * kMs), at_us + length_us + rng_.Between(0, 20 * kMs));
  }
}

void MembershipSim::CutPair(int a, int b, int64_t at_us, int64_t heal_us, bool one_way) {
  undisturbed_ = false;
  uncertain_ = true;
  queue_.At(at_us, [this, a, b, one_way] {
    Trace("the wire from rank " + std::to_string(a) + " to rank " + std::to_string(b) + " is cut" +
          (one_way ? "" : ", both ways"));
    wires_->Cut(a, b);
    if (!one_way) wires_->Cut(b, a);
  });
  if (heal_us < 0) return;
  last_fault_us_ = std::max(last_fault_us_, heal_us);
  queue_.At(heal_us, [this, a, b] {
    Trace("the wire between ranks " + std::to_string(a) + " and " + std::to_string(b) + " heals");
    wires_->Heal(a, b);
    wires_->Heal(b, a);
    cut_us_[{a, b}] = cut_us_[{b, a}] = queue_.now_us();
  });
}

void MembershipSim::Partition(const std::vector<bool>& side, int64_t at_us, int64_t heal_us,
                              bool one_way) {
  for (int a = 0; a < size_; ++a) {
    for (int b = 0; b < size_; ++b) {
      const bool apart =
          side[static_cast<size_t>(At(a).host)] && !side[static_cast<size_t>(At(b).host)];
      if (apart) CutPair(a, b, at_us, heal_us, one_way);
    }
  }
}

void MembershipSim::Isolate(int rank, int64_t heal_us) {
  for (int peer = 0; peer < size_; ++peer) {
    if (At(peer).host == At(rank).host) continue;
    wires_->Cut(rank, peer);
    wires_->Cut(peer, rank);
    if (heal_us >= 0) CutPair(rank, peer, queue_.now_us(), heal_us, false);
  }
}

// A rank that was armed is hit while it sends `letter`: this one is out, or the next would be.
void MembershipSim::Spring(Node* node, int to, const Letter& letter) {
  const int rank = node->rank;
  if (rng_.Chance(50)) wires_->Send(rank, to, letter);
  switch (node->armed) {
    case Node::Armed::kKill:
      Kill(node, false);
      return;
    case Node::Armed::kStop:
      Stop(node);
      queue_.After(rng_.Between(200 * kMs, 5 * kSecond), [this, rank] { Continue(&At(rank)); });
      break;
    case Node::Armed::kIsolate:
      Trace("rank " + std::to_string(rank) + " is cut off");
      Isolate(rank, rng_.Chance(60) ? queue_.now_us() + rng_.Between(100 * kMs, 6 * kSecond) : -1);
      break;
  }
  Send(node, to, letter);
}

void MembershipSim::ResetPair(int a, int b, int64_t at_us) {
  undisturbed_ = false;
  uncertain_ = true;
  queue_.At(at_us, [this, a, b] {
    Trace("the connection of ranks " + std::to_string(a) + " and " + std::to_string(b) +
          " is reset");
    Letter end;
    end.kind = Letter::Kind::kEnd;
    for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
      if (wires_->IsClosed(from, to)) continue;
      wires_->Drop(from, to);
      wires_->Send(from, to, end);
      wires_->Close(from, to);
    }
  });
}

void MembershipSim::KillHost(int host, int64_t at_us) {
  uncertain_ = true;
  queue_.At(at_us, [this, host] {
    for (Node& node : nodes_) {
      if (node.host == host) Kill(&node, true);
    }
  });
}

// ---- plans ----

void MembershipSim::Plan() {
  const int64_t kind = rng_.Between(1, 100);
  if (kind <= 35) {
    PlanSingle();
  } else if (kind <= 47) {
    PlanSlow();
  } else {
    PlanMany();
  }
}

void MembershipSim::PlanSingle() {
  const int64_t at_us = rng_.Between(300 * kMs, 900 * kMs);
  const int rank = rng_.Index(static_cast<size_t>(size_));
  const int host = At(rank).host;
  last_fault_us_ = single_us_ = at_us;
  const bool one_host = hosts_ == 1;
  std::set<int> touched = {rank};
  bool certain = one_host || launcher_;
  switch (rng_.Between(0, one_host ? 3 : 8)) {
    case 0:
      result_.single_fault = certain ? "kill" : "kill without a launcher";
      uncertain_ = !certain;
      queue_.At(at_us, [this, rank] { Kill(&At(rank), false); });
      break;
    case 1:
      result_.single_fault = one_host ? "stop, one host" : "stop, several hosts";
      uncertain_ = !one_host;  // there it is barred
      certain = one_host;
      StopAt(rank, at_us, rng_.Chance(50) ? at_us + rng_.Between(4 * kSecond, 8 * kSecond) : -1);
      break;
    case 2:
      result_.single_fault = "own failure";
      certain = true;
      queue_.At(at_us, [this, rank] {
        At(rank).now.consensus->Withdraw("ValueError: a bug of the user");
        Flow(&At(rank));
      });
      break;
    case 3:
      result_.single_fault = "deadline";
      certain = true;
      touched.clear();
      queue_.At(at_us, [this, rank] {
        At(rank).now.consensus->AddEvidence({{kNoRank, true, "rank 1 did not call it"}});
        Flow(&At(rank));
      });
      break;
    case 4: {
      result_.single_fault = "host lost";
      certain = false;
      for (const Node& node : nodes_) {
        if (node.host == host) touched.insert(node.rank);
      }
      KillHost(host, at_us);
      break;
    }
    case 5:
    case 6: {
      const bool one_way = rng_.Chance(40);
      result_.single_fault = one_way ? "partition, one way" : "partition";
      certain = false;
      std::vector<bool> side(static_cast<size_t>(hosts_), false);
      for (size_t h = 0; h < side.size(); ++h) side[h] = rng_.Chance(50);
      side[static_cast<size_t>(host)] = true;
      side[static_cast<size_t>((host + 1) % hosts_)] = false;
      // The smaller side is the one that is out.
      touched.clear();
      std::set<int> rest;
      for (const Node& node : nodes_) {
        (side[static_cast<size_t>(node.host)] ? touched : rest).insert(node.rank);
      }
      const bool tie_lost = touched.size() == rest.size() && touched.count(0) > 0;
      if (touched.size() > rest.size() || tie_lost) std::swap(touched, rest);
      Partition(side, at_us, rng_.Chance(40) ? at_us + rng_.Between(4 * kSecond, 8 * kSecond) : -1,
                one_way);
      break;
    }
    case 7: {
      const bool one_way = rng_.Chance(50);
      result_.single_fault = one_way ? "cut of a pair, one way" : "cut of a pair";
      int other = rank;
      while (At(other).host == host) other = rng_.Index(static_cast<size_t>(size_));
      // Of two that lose each other the smaller accuses first. One way, the receiver notices first,
      // the sender when its beats are no longer acknowledged: either can be out.
      touched = one_way ? std::set<int>{rank, other} : std::set<int>{std::max(rank, other)};
      certain = one_way && size_ > 2;
      CutPair(rank, other, at_us, -1, one_way);
      break;
    }
    default: {
      result_.single_fault = "reset of a pair";
      certain = false;
      int other = rank;
      while (At(other).host == host) other = rng_.Index(static_cast<size_t>(size_));
      touched.insert(other);
      ResetPair(rank, other, at_us);
      certain = true;  // both say that they are out
    }
  }
  if (size_ > 8) return;  // not everybody watches everybody
  std::vector<Evidence> evidence;
  std::vector<int> members;
  for (int r = 0; r < size_; ++r) members.push_back(r);
  for (int r : touched) evidence.push_back({r, certain, ""});
  if (!MayDecide(members, evidence)) return;
  for (int r : members) {
    if (touched.count(r) == 0) expect_decided_.insert(r);
  }
}

void MembershipSim::PlanSlow() {
  slow_only_ = true;
  const int64_t begin_us = rng_.Between(300 * kMs, 900 * kMs);
  last_fault_us_ = begin_us;
  const int rank = rng_.Index(static_cast<size_t>(size_));
  const int kind = static_cast<int>(rng_.Between(0, 3));
  if (kind == 0) {
    FreezeJob(begin_us, rng_.Between(kSecond, 8 * kSecond));
  } else if (kind == 1 && hosts_ == 1) {
    StopAt(rank, begin_us, begin_us + rng_.Between(100 * kMs, 700 * kMs));
  } else if (kind == 2 && hosts_ > 1) {
    int other = rank;
    while (At(other).host == At(rank).host) other = rng_.Index(static_cast<size_t>(size_));
    const int64_t heal_us = begin_us + rng_.Between(200 * kMs, 900 * kMs);
    CutPair(rank, other, begin_us, heal_us, rng_.Chance(50));
    StallAt(other, heal_us - 10 * kMs, rng_.Between(100 * kMs, 700 * kMs));
  } else {
    // An overloaded machine: on one host nobody is suspected for it, however long it takes.
    const int64_t longest_us = hosts_ == 1 ? 5 * kSecond : 1500 * kMs;
    for (int r = 0; r < size_; ++r) {
      int64_t at_us = begin_us + rng_.Between(0, kSecond);
      for (int64_t n = rng_.Between(0, 3); n > 0; --n) {
        const int64_t length_us = rng_.Between(100 * kMs, longest_us);
        StallAt(r, at_us, length_us);
        at_us += length_us + rng_.Between(400 * kMs, kSecond);
      }
    }
  }
}

void MembershipSim::PlanMany() {
  int64_t at_us = rng_.Between(300 * kMs, 900 * kMs);
  last_fault_us_ = at_us;
  // Some ranks die or stop in the middle of what they are telling the others.
  for (Node& node : nodes_) {
    if (!rng_.Chance(20)) continue;
    const int rank = node.rank;
    const int kind = static_cast<int>(rng_.Between(0, 4));
    const int sends = static_cast<int>(rng_.Between(1, kind == 0 ? 4 * size_ : size_));
    const auto armed = static_cast<Node::Armed>(rng_.Between(0, hosts_ > 1 ? 2 : 1));
    if (armed != Node::Armed::kKill) undisturbed_ = false;
    if (armed != Node::Armed::kKill || hosts_ > 1) uncertain_ = true;
    queue_.At(at_us, [this, rank, kind, sends, armed] {
      At(rank).armed_kind = kind;
      At(rank).armed_sends = sends;
      At(rank).armed = armed;
    });
  }
  for (int64_t n = rng_.Between(1, 4); n > 0; --n) {
    AddFault(at_us);
    const int64_t pace = rng_.Between(0, 2);
    at_us += pace == 0   ? rng_.Between(0, 3 * kMs)
             : pace == 1 ? rng_.Between(0, 300 * kMs)
                         : rng_.Between(0, 3 * kSecond);
  }
  last_fault_us_ = std::max(last_fault_us_, at_us);
}

void MembershipSim::AddFault(int64_t at_us) {
  const int rank = rng_.Index(static_cast<size_t>(size_));
  int other = rng_.Index(static_cast<size_t>(size_));
  const int64_t length_us =
      rng_.Chance(50) ? rng_.Between(100 * kMs, 2500 * kMs) : rng_.Between(kSecond, 7 * kSecond);
  const int64_t end_us = rng_.Chance(70) ? at_us + length_us : -1;
  if (hosts_ > 1) {
    while (At(other).host == At(rank).host) other = rng_.Index(static_cast<size_t>(size_));
  }
  switch (rng_.Between(0, hosts_ == 1 ? 4 : 9)) {
    case 0:
    case 1:
      if (hosts_ > 1) uncertain_ = true;
      queue_.At(at_us, [this, rank] { Kill(&At(rank), false); });
      break;
    case 2:
      if (hosts_ > 1) uncertain_ = true;
      StopAt(rank, at_us, end_us);
      break;
    case 3:
      queue_.At(at_us, [this, rank] {
        if (!Live(At(rank)) || Asleep(At(rank))) return;
        At(rank).now.consensus->Withdraw("ValueError: a bug of the user");
        Flow(&At(rank));
      });
      break;
    case 4:
      queue_.At(at_us, [this, rank] {
        if (!Live(At(rank)) || Asleep(At(rank))) return;
        At(rank).now.consensus->AddEvidence({{kNoRank, true, "rank 1 did not call it"}});
        Flow(&At(rank));
      });
      break;
    case 5:
      KillHost(At(rank).host, at_us);
      break;
    case 6: {
      std::vector<bool> side(static_cast<size_t>(hosts_), false);
      for (size_t h = 0; h < side.size(); ++h) side[h] = rng_.Chance(50);
      Partition(side, at_us, end_us, rng_.Chance(30));
      break;
    }
    case 7:
      CutPair(rank, other, at_us, end_us, rng_.Chance(50));
      break;
    case 8:
      ResetPair(rank, other, at_us);
      break;
    default:
      StallAt(rank, at_us, rng_.Between(100 * kMs, 1500 * kMs));
  }
}

}  // namespace tfdist::sim
