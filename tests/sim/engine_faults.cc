// Faults in a simulated world of engines, and when they happen.
#include <algorithm>

#include "engine_world.h"

namespace tfdist::sim {

void EngineWorld::Stop(int rank) {
  if (At(rank).state != State::kRuns) return;
  Trace("rank " + std::to_string(rank) + " is stopped");
  At(rank).state = State::kStopped;
}

void EngineWorld::Continue(int rank) {
  Rank& own = At(rank);
  if (own.state == State::kStopped) own.state = State::kRuns;
  if (Asleep(own) || own.state == State::kDead) return;
  Trace("rank " + std::to_string(rank) + " runs again");
  for (auto& body : std::exchange(own.deferred, {})) body();
  if (std::exchange(own.turn_due, false)) ScheduleTurn(rank, queue_.now_us());
}

void EngineWorld::Kill(int rank, bool silent) {
  Rank& own = At(rank);
  if (own.state == State::kDead || own.left) return;
  Trace("rank " + std::to_string(rank) + (silent ? " vanishes" : " is killed"));
  for (int peer = 0; peer < size_; ++peer) Pipe(rank, peer).silent = silent;
  if (!silent) death_us_ = queue_.now_us();
  own.state = State::kDead;
  own.completions.clear();
  own.deferred.clear();
  own.commands.clear();
  own.engine.reset();
}

void EngineWorld::Plan() {
  // A training without faults takes some tens of milliseconds here.
  if (rng_.Chance(70)) PlanFault();
}

void EngineWorld::PlanFault() {
  const int rank = rng_.Index(static_cast<size_t>(size_));
  int other = rng_.Index(static_cast<size_t>(size_));
  while (other == rank) other = rng_.Index(static_cast<size_t>(size_));
  const int64_t at_us = rng_.Between(0, rng_.Chance(60) ? 15 * kMs : 80 * kMs);
  fault_us_ = at_us;
  const auto phase = static_cast<size_t>(rng_.Index(program_.phases.size()));
  const auto ends = [this](const char* name) {
    result_.fault = name;
    may_fail_ = true;
  };
  switch (rng_.Between(0, 9)) {
    case 0:
    case 1:
      ends("kill");
      queue_.At(at_us, [this, rank] { Kill(rank, false); });
      if (rng_.Chance(30)) queue_.At(at_us + rng_.Between(0, kMs), [=] { Kill(other, false); });
      break;
    case 2:
      ends("host lost");
      queue_.At(at_us, [this, rank] { Kill(rank, true); });
      break;
    case 3:
      ends("stop");
      queue_.At(at_us, [this, rank] { Stop(rank); });
      if (rng_.Chance(60)) {
        fault_us_ = at_us + rng_.Between(2 * kSecond, 8 * kSecond);
        queue_.At(fault_us_, [this, rank] { Continue(rank); });
      }
      break;
    case 4: {  // nothing may fail
      if (rng_.Chance(40)) {
        result_.fault = "suspended job";
        fault_us_ = at_us + rng_.Between(kSecond, 20 * kSecond);
        queue_.At(at_us, [this] {
          for (int r = 0; r < size_; ++r) Stop(r);
        });
        queue_.At(fault_us_, [this] {
          for (int r = 0; r < size_; ++r) Continue(r);
        });
        break;
      }
      result_.fault = "slow";
      for (int r = 0; r < size_; ++r) {
        if (rng_.Chance(50)) continue;
        const int64_t begin_us = rng_.Between(0, 60 * kMs);
        const int64_t end_us = begin_us + rng_.Between(kMs, 700 * kMs);
        fault_us_ = std::max(fault_us_, end_us);
        queue_.At(begin_us, [this, r, end_us] { At(r).stalled_until_us = end_us; });
        queue_.At(end_us, [this, r] { Continue(r); });
      }
      break;
    }
    case 5: {
      const bool heals = rng_.Chance(60);
      const int64_t heal_us = at_us + rng_.Between(10 * kMs, 900 * kMs);
      if (heals) {
        result_.fault = "cut that heals";
        fault_us_ = heal_us;
      } else {
        ends("cut");
      }
      const bool one_way = rng_.Chance(50);
      queue_.At(at_us, [this, rank, other, one_way] {
        Pipe(rank, other).cut = true;
        if (!one_way) Pipe(other, rank).cut = true;
        Trace("the link from rank " + std::to_string(rank) + " to rank " + std::to_string(other) +
              " is cut" + (one_way ? "" : ", both ways"));
      });
      if (!heals) break;
      queue_.At(heal_us, [this, rank, other] {
        Pipe(rank, other).Heal();
        Pipe(other, rank).Heal();
        Trace("the link heals");
        for (int end : {rank, other}) WakeRank(end);
      });
      break;
    }
    case 6:
      ends("reset");
      queue_.At(at_us, [this, rank, other] {
        Trace("the link of ranks " + std::to_string(rank) + " and " + std::to_string(other) +
              " is reset");
        Pipe(rank, other).Reset();
        Pipe(other, rank).Reset();
      });
      break;
    case 7:
      ends("own failure");
      OnRank(rank, at_us, [this](Rank* own) {
        if (own->engine == nullptr || own->finished) return;
        if (!own->running.empty() && rng_.Chance(50)) {
          const uint64_t id = own->running.begin()->first;
          Trace("rank " + std::to_string(own->rank) + " cancels an operation");
          own->commands.push_back([this, id](Engine* e) { e->Cancel(id, queue_.now_us()); });
        } else {
          Trace("rank " + std::to_string(own->rank) + " fails in its own program");
          own->commands.push_back(
              [this](Engine* e) { e->AbortWith({"ValueError: a bug", "", -1}, queue_.now_us()); });
        }
        WakeRank(own->rank);
      });
      break;
    case 8:
      ends("call left out");
      skipped_ = {phase, rank};
      break;
    default:
      result_.fault = "another shape";
      altered_ = {phase, rank};
  }
}

}  // namespace tfdist::sim
