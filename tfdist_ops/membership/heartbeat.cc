#include "membership/heartbeat.h"

#include <algorithm>
#include <cstdio>

namespace tfdist {
namespace {

constexpr int kWatchAllUpTo = 8;

std::string Seconds(int64_t us) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(us) / 1e6);
  return text;
}

}  // namespace

int64_t OwnTime::Advance(int64_t now_us) {
  const int64_t gap = last_us_ < 0 ? 0 : now_us - last_us_;
  last_us_ = now_us;
  return gap > 2 * period_us_ ? period_us_ : std::max<int64_t>(gap, 0);
}

std::vector<int> WatchedRanks(int rank, int size) {
  std::vector<int> watched;
  if (size <= kWatchAllUpTo) {
    for (int r = 0; r < size; ++r) {
      if (r != rank) watched.push_back(r);
    }
    return watched;
  }
  for (int distance = 1; distance <= size / 2; distance *= 2) {
    watched.push_back((rank + distance) % size);
    watched.push_back((rank - distance + size) % size);
  }
  std::sort(watched.begin(), watched.end());
  watched.erase(std::unique(watched.begin(), watched.end()), watched.end());
  return watched;
}

HeartbeatMonitor::HeartbeatMonitor(int rank, const std::vector<int>& members,
                                   const std::vector<bool>& same_host,
                                   const HeartbeatOptions& options)
    : rank_(rank), options_(options), own_(options.period_us) {
  const auto own =
      static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] != rank) peers_[members[i]].same_host = same_host[i];
  }
  for (int i : WatchedRanks(own, static_cast<int>(members.size()))) {
    peers_[members[static_cast<size_t>(i)]].watched = true;
  }
}

void HeartbeatMonitor::OnFrame(int peer) {
  const auto it = peers_.find(peer);
  if (it != peers_.end()) it->second.silent_us = 0;
}

void HeartbeatMonitor::Receive(int peer, const Heartbeat& beat) {
  OnFrame(peer);
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  it->second.read = std::max(it->second.read, beat.sequence);
  // A peer cannot have read what was never sent.
  if (beat.acknowledged <= it->second.sent) {
    it->second.acknowledged = std::max(it->second.acknowledged, beat.acknowledged);
  }
}

void HeartbeatMonitor::SetProcessState(int peer, ProcessState state) {
  const auto it = peers_.find(peer);
  if (it == peers_.end() || !it->second.same_host) return;
  it->second.state = state;
  if (state != ProcessState::kStopped) it->second.stopped_us = 0;
}

std::vector<int> HeartbeatMonitor::WantProcessState() const {
  std::vector<int> wanted;
  for (const auto& [rank, peer] : peers_) {
    const bool silent = peer.silent_us + options_.period_us >= options_.look_us;
    if (peer.watched && peer.same_host && !peer.suspected && silent) wanted.push_back(rank);
  }
  return wanted;
}

void HeartbeatMonitor::WatchAll() {
  for (auto& [rank, peer] : peers_) {
    if (peer.watched) continue;
    peer.watched = true;
    peer.silent_us = 0;
  }
}

int64_t HeartbeatMonitor::Limit(int rank) const {
  return options_.silence_us + (rank < rank_ ? options_.yield_us : 0);
}

bool HeartbeatMonitor::Gathering() const {
  for (const auto& [rank, peer] : peers_) {
    if (!peer.watched || peer.suspected || peer.state != ProcessState::kUnknown) continue;
    const int64_t limit_us = Limit(rank);
    if (peer.silent_us < limit_us && peer.silent_us >= limit_us - options_.gather_us) return true;
  }
  return false;
}

bool HeartbeatMonitor::Judge(int rank, Peer* peer, int64_t passed_us, Evidence* evidence) const {
  evidence->rank = rank;
  if (peer->state == ProcessState::kGone) {
    evidence->certain = true;
    evidence->cause = "its process is gone";
    return true;
  }
  if (peer->silent_us < options_.look_us) {  // what was seen earlier is out of date
    peer->state = ProcessState::kUnknown;
    peer->stopped_us = 0;
    return false;
  }
  if (peer->state == ProcessState::kRunning) return false;
  if (peer->state == ProcessState::kStopped) {
    peer->stopped_us += passed_us;
    if (peer->stopped_us < options_.stopped_us) return false;
    evidence->cause = "its process has been stopped for " + Seconds(peer->stopped_us);
    return true;
  }
  if (peer->silent_us < Limit(rank) || Gathering()) return false;
  evidence->cause = "no sign of life for " + Seconds(peer->silent_us);
  return true;
}

HeartbeatMonitor::Turn HeartbeatMonitor::Tick(int64_t now_us) {
  Turn turn;
  const int64_t passed_us = own_.Advance(now_us);
  const bool beat = now_us >= next_beat_us_;
  if (beat) next_beat_us_ = now_us + options_.period_us * 9 / 10;  // a tick may come a bit early
  for (auto& [rank, peer] : peers_) peer.silent_us += passed_us;
  for (auto& [rank, peer] : peers_) {
    if (!peer.watched || peer.suspected) continue;
    Evidence evidence;
    if (Judge(rank, &peer, passed_us, &evidence)) {
      peer.suspected = true;
      turn.evidence.push_back(std::move(evidence));
      continue;
    }
    const auto in_flight = static_cast<int>(peer.sent - peer.acknowledged);
    if (!beat) continue;
    if (in_flight < options_.max_unacknowledged) {
      ++peer.sent;
    } else if (peer.read == peer.told) {
      continue;
    }
    peer.told = peer.read;
    turn.beats.push_back({rank, Heartbeat{peer.sent, peer.read}});
  }
  return turn;
}

}  // namespace tfdist
