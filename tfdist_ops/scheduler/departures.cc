#include "scheduler/departures.h"

#include <algorithm>
#include <string>
#include <utility>

#include "scheduler/failure_status.h"

namespace tfdist {

Departures::Departures(const Access& access) : access_(access), peers_(access.links.size()) {}

// ---- peers ----

void Departures::OnGoodbye(int peer, LeaveNote took_part) {
  const auto p = static_cast<size_t>(peer);
  peers_[p].took_part = std::move(took_part);
  peers_[p].left = true;
  peers_[p].said_goodbye = true;
  peers_[p].answer_due = true;
  if (access_.links[p] != nullptr) access_.links[p]->PeerLeaves();
  access_.monitor->Forget(peer);
  // Only a set's leader knows whether a key still waits for the peer, or is already announced;
  // after the leader's own goodbye nothing will be.
  for (const auto& [id, led] : access_.sets) {
    if (led->ranks.empty() || led->leader() != peer) continue;
    const bool joins = led->joining != nullptr && !led->join_answer.has_value();
    if (led->entries.empty() && !joins) continue;
    ReportMissed(peer);
    break;
  }
  CheckPredicted(peer);
  CheckAnnounced();
}

void Departures::OnLost(int peer) {
  peers_[static_cast<size_t>(peer)].left = true;
  peers_[static_cast<size_t>(peer)].acknowledged = true;
}

std::vector<int> Departures::TakeGoodbyes() {
  std::vector<int> goodbyes;
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (!peers_[p].said_goodbye || peers_[p].counted_out) continue;
    peers_[p].counted_out = true;
    goodbyes.push_back(static_cast<int>(p));
  }
  return goodbyes;
}

void Departures::AnswerGoodbyes() {
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (!peers_[p].answer_due) continue;
    const int peer = static_cast<int>(p);
    const bool needed =
        std::any_of(access_.sets.begin(), access_.sets.end(), [peer](const auto& item) {
          const ProcessSet& set = *item.second;
          return set.IndexOf(peer) >= 0 && !(set.active.empty() && set.allocating.empty());
        });
    if (needed) continue;
    peers_[p].answer_due = false;
    // Only the end of a connection can take unread bytes with it.
    if (access_.links[p] == nullptr || !access_.links[p]->Direct()) continue;
    access_.control->Send(peer, FrameType::kLeaveAck, kWorldSet, "");
  }
}

// ---- operations that miss a peer ----

void Departures::ReportMissed(int peer) {
  const std::string key = access_.pending.OldestKey();
  uint32_t steps = 0;
  for (const auto& [set, tickets] : peers_[static_cast<size_t>(peer)].took_part) {
    for (uint64_t ticket : tickets) {
      if (TicketGroup(ticket) != kRepeatedGroup) steps = std::max(steps, TicketSequence(ticket));
    }
  }
  const World& world = access_.world;
  ErrorRecord record{"shutdown",         peer, HostOf(world, peer), PidOf(world, peer), key,
                     "it has shut down", ""};
  const Status status(Code::kAborted,
                      DescribeRank(world, peer) +
                          " has shut down (called tfdist.shutdown() or ended)" +
                          (steps > 0 ? " after " + std::to_string(steps) + " training steps" : "") +
                          (key.empty() ? "" : " and will not take part in \"" + key + "\"") +
                          ". Every rank must make the same calls: check that all have the same "
                          "number of steps.",
                      record);
  access_.failures->Suspect(peer, true, status);
}

void Departures::CheckAnnounced() {
  for (const auto& [id, set] : access_.sets) {
    if (set->negotiator == nullptr || access_.state.stopped) continue;
    for (int32_t rank : set->ranks) {
      if (!HasLeft(rank)) continue;
      const bool joins_wait = !set->joins->empty() && !set->joins->Has(rank);
      if (!joins_wait && !set->negotiator->WaitsFor(rank)) continue;
      ReportMissed(rank);
      return;
    }
  }
}

void Departures::CheckPredicted(int peer) {
  const LeaveNote& took_part = peers_[static_cast<size_t>(peer)].took_part;
  for (const auto& [id, set] : access_.sets) {
    if (set->IndexOf(peer) < 0) continue;
    const auto last = took_part.find(id);
    for (const auto& [turn, active] : set->active) {
      const uint64_t ticket = active.operation->ticket();
      if (!IsPredicted(ticket)) continue;
      if (last != took_part.end() && TookPart(last->second, ticket)) continue;
      ReportMissed(peer);
      return;
    }
  }
}

void Departures::CheckArrived() {
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (!peers_[p].said_goodbye || access_.links[p] != nullptr) continue;
    const int peer = static_cast<int>(p);
    for (const auto& [id, set] : access_.sets) {
      for (const auto& [turn, active] : set->active) {
        if (access_.state.stopped || !active.operation->Awaits(peer)) continue;
        const std::string& key = active.operation->members()[0]->info.key;
        access_.failures->Suspect(
            peer, true,
            RankFailure(access_.world, key, peer,
                        "it has shut down, and its connection ended before all of its data had "
                        "arrived",
                        ""));
        return;
      }
    }
  }
}

// ---- this rank ----

void Departures::SayGoodbye() {
  LeaveNote note;
  for (const auto& [id, set] : access_.sets) note[id] = set->book.LastTickets();
  access_.control->SendToAll(FrameType::kLeave, EncodeLeave(note));
}

bool Departures::IsGoodbyeHeard() const {
  for (size_t p = 0; p < access_.links.size(); ++p) {
    const auto& link = access_.links[p];
    if (link == nullptr) continue;
    if (access_.control->HasQueued(static_cast<int>(p)) || !link->Flushed()) return false;
    if (link->Direct() && !peers_[p].acknowledged) return false;
  }
  return true;
}

}  // namespace tfdist
