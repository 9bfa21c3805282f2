#include "transport/overlay.h"

#include <cstring>
#include <utility>

#include "base/logging.h"
#include "transport/link_support.h"
#include "transport/routes.h"

namespace tfdist {
namespace {

// FrameHeader::type of the overlay's own frames; the engine's are small numbers.
constexpr uint8_t kGone = 0xf0;         // slice: the rank that is gone; to a neighbor
constexpr uint8_t kAcknowledge = 0xf1;  // ticket: number of the next frame that is expected
constexpr uint8_t kWantLink = 0xf2;     // numbered like the engine's frames

// Relayed frames use fields that a control frame on a direct link does not need (its `phase` is 0).
// phase: hops + 1; slice: source and destination; ticket: number of the frame within their pair.
uint32_t Ends(int source, int destination) {
  return static_cast<uint32_t>(source) << 16 | static_cast<uint32_t>(destination);
}
int SourceOf(const FrameHeader& header) { return static_cast<int>(header.slice >> 16); }
int DestinationOf(const FrameHeader& header) { return static_cast<int>(header.slice & 0xffff); }

// Far more hops than any route has; only a faulty rank sends a frame with more.
constexpr uint16_t kMostHops = 1024;

}  // namespace

Overlay::Overlay(int rank, int size, uint32_t generation, Hooks hooks)
    : rank_(rank),
      size_(size),
      generation_(generation),
      hooks_(std::move(hooks)),
      neighbours_(OverlayNeighbours(rank, size)),
      peers_(static_cast<size_t>(size)) {
  for (int neighbour : neighbours_) At(neighbour).neighbour = true;
}

// ---- routes ----

void Overlay::FindRoutes() {
  std::vector<int> usable;   // alive, and not about to leave
  std::vector<int> leaving;  // alive, for destinations without another route
  for (int neighbour : neighbours_) {
    const Peer& peer = At(neighbour);
    if (peer.closed || peer.gone) continue;
    leaving.push_back(neighbour);
    if (!peer.left) usable.push_back(neighbour);
  }
  next_hop_.assign(static_cast<size_t>(size_), -1);
  for (int to = 0; to < size_; ++to) {
    if (to == rank_ || At(to).gone) continue;
    int next = NextHop(rank_, to, size_, usable);
    if (next < 0) next = NextHop(rank_, to, size_, leaving);
    next_hop_[static_cast<size_t>(to)] = next;
  }
}

void Overlay::Forward(Letter letter) {
  const int to = DestinationOf(letter.header);
  const int next = next_hop_[static_cast<size_t>(to)];
  if (next >= 0) {
    Queue(next, std::move(letter));
    return;
  }
  ++counters_.dropped;
  TFDIST_LOG(kDebug, rank_, "OVERLAY",
             "a frame from rank " << SourceOf(letter.header) << " to rank " << to
                                  << " is dropped: there is no route any more");
  if (SourceOf(letter.header) != rank_) return;
  At(to).unacknowledged.clear();
  NoteLoss(to, PeerLost(to, "cannot be reached: the ranks between have left or failed"));
}

void Overlay::Queue(int neighbour, Letter letter) {
  At(neighbour).queue.push_back(std::move(letter));
  Flush(neighbour);
}

bool Overlay::Flush(int neighbour) {
  Peer& peer = At(neighbour);
  bool moved = false;
  while (!peer.queue.empty() && peer.link != nullptr) {
    const Letter& letter = peer.queue.front();
    const MutableByteSpan room = peer.link->BeginSend(Lane::kControl, letter.payload.size());
    if (room.data() == nullptr) break;
    if (!letter.payload.empty()) {
      std::memcpy(room.data(), letter.payload.data(), letter.payload.size());
    }
    peer.link->CommitSend(Lane::kControl, letter.header);
    peer.queue.pop_front();
    moved = true;
  }
  return moved;
}

// ---- frames of the engine ----

void Overlay::Send(int to, FrameHeader header, std::string payload) {
  Peer& peer = At(to);
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  header.lane = static_cast<uint8_t>(Lane::kControl);
  header.phase = 1;
  header.slice = Ends(rank_, to);
  header.ticket = peer.next_out++;
  ++counters_.sent;
  Letter letter{header, std::move(payload)};
  if (!peer.left) peer.unacknowledged.push_back(letter);
  Forward(std::move(letter));
}

void Overlay::Want(int to) {
  Peer& peer = At(to);
  if (peer.wanted) return;
  peer.wanted = true;
  hooks_.wanted(to);
  if (to < rank_) return;
  FrameHeader header;
  header.type = kWantLink;
  header.generation = generation_;
  Send(to, header, "");
}

void Overlay::Receive(int neighbour, Letter letter) {
  FrameHeader& header = letter.header;
  if (header.type == kGone) {
    const auto about = static_cast<int>(header.slice);
    if (header.slice >= static_cast<uint32_t>(size_) || header.generation != generation_) {
      Garbage(neighbour, "news of rank " + std::to_string(header.slice));
    } else if (about != rank_) {
      Lose(about, PeerLost(about, "closed its connection to another rank"), neighbour);
    }
    return;
  }
  const int source = SourceOf(header);
  const int destination = DestinationOf(header);
  if (source >= size_ || destination >= size_ || source == rank_ || source == destination ||
      header.phase > kMostHops || header.generation != generation_) {
    Garbage(neighbour, "a relayed frame from rank " + std::to_string(source) + " to rank " +
                           std::to_string(destination) + " of generation " +
                           std::to_string(header.generation));
  } else if (destination != rank_) {
    ++header.phase;
    ++counters_.relayed;
    Forward(std::move(letter));
  } else if (At(source).neighbour) {
    Garbage(neighbour, "a relayed frame from a neighbor");
  } else {
    Deliver(source, std::move(letter));
  }
}

void Overlay::Garbage(int neighbour, const std::string& what) {
  NoteLoss(neighbour, PeerGarbage(neighbour, what));
}

void Overlay::Deliver(int source, Letter letter) {
  Peer& peer = At(source);
  const uint64_t number = letter.header.ticket;
  if (letter.header.type == kAcknowledge) {
    HearAcknowledgement(source, number);
    return;
  }
  if (number > peer.next_in + kWindow) return;  // more than it may have under way
  if (number > peer.next_in) {
    peer.early.emplace(number, std::move(letter));
    return;
  }
  if (number == peer.next_in) {
    Accept(source, std::move(letter));
    while (!peer.early.empty() && peer.early.begin()->first == peer.next_in) {
      Letter next = std::move(peer.early.begin()->second);
      peer.early.erase(peer.early.begin());
      Accept(source, std::move(next));
    }
  }
  // Also for a repetition: its acknowledgement may be what was lost.
  if (doubtful_ || peer.next_in - peer.acknowledged >= kAckEvery) Acknowledge(source);
}

void Overlay::Accept(int source, Letter letter) {
  Peer& peer = At(source);
  ++peer.next_in;
  if (letter.header.type == kWantLink) {
    Want(source);
    return;
  }
  if (peer.closed) return;  // the engine has closed its Link
  peer.inbox.push_back(std::move(letter));
  arrived_ = true;
}

void Overlay::Acknowledge(int source) {
  Peer& peer = At(source);
  peer.acknowledged = peer.next_in;
  FrameHeader header;
  header.type = kAcknowledge;
  header.generation = generation_;
  header.phase = 1;
  header.slice = Ends(rank_, source);
  header.ticket = peer.next_in;
  if (next_hop_[static_cast<size_t>(source)] >= 0) Forward({header, ""});
}

void Overlay::HearAcknowledgement(int source, uint64_t next) {
  std::list<Letter>& waiting = At(source).unacknowledged;
  while (!waiting.empty() && waiting.front().header.ticket < next) waiting.pop_front();
}

// ---- the engine's view of one peer ----

bool Overlay::PollControl(int from, InFrame* frame) {
  Peer& peer = At(from);
  if (peer.neighbour) {
    while (peer.link != nullptr && peer.link->Poll(Lane::kControl, frame)) {
      if (frame->header.phase == 0 && frame->header.type < kGone) return true;
      Letter letter{frame->header, std::string(reinterpret_cast<const char*>(frame->payload.data()),
                                               frame->payload.size())};
      peer.link->Release(Lane::kControl, *frame);
      Receive(from, std::move(letter));
    }
    peer.drained = peer.ending;
    return false;
  }
  if (peer.inbox.empty()) return false;
  peer.held.splice(peer.held.end(), peer.inbox, peer.inbox.begin());
  Letter& letter = peer.held.back();
  frame->header = letter.header;
  frame->payload = {reinterpret_cast<const uint8_t*>(letter.payload.data()), letter.payload.size()};
  frame->token = reinterpret_cast<uintptr_t>(&letter);
  return true;
}

void Overlay::ReleaseControl(int from, const InFrame& frame) {
  Peer& peer = At(from);
  if (peer.neighbour) {
    peer.link->Release(Lane::kControl, frame);
    return;
  }
  for (auto it = peer.held.begin(); it != peer.held.end(); ++it) {
    if (reinterpret_cast<uintptr_t>(&*it) != frame.token) continue;
    peer.held.erase(it);
    return;
  }
}

Status Overlay::Pump(int to, bool* moved) {
  Peer& peer = At(to);
  if (arrived_) *moved = true;
  arrived_ = false;
  if (peer.link != nullptr) {
    *moved |= Flush(to);
    const Status status = peer.link->Pump(moved);
    if (!status.ok()) {
      // Frames that it sent before may tell which rank was lost first, so they are read first.
      if (peer.drained || !peer.neighbour) EndedLink(to, status);
      *moved |= !peer.ending;
      peer.ending = true;
    }
  }
  if (doubtful_) Repeat();
  if (peer.error.ok()) return Status();
  if (losses_.front() == to) return peer.error;
  *moved = true;
  return Status();
}

void Overlay::Adopt(int to, std::unique_ptr<Link> link) {
  Peer& peer = At(to);
  // Too late for a rank that is lost, and not needed for one that has a link already.
  if (peer.link != nullptr || peer.closed || !peer.error.ok()) return;
  peer.link = std::move(link);
  peer.wanted = true;
  ++counters_.adopted;
  arrived_ = true;
}

// ---- loss ----

void Overlay::Leaves(int leaving) {
  Peer& peer = At(leaving);
  peer.left = true;
  peer.unacknowledged.clear();  // nothing that it waits for
  if (peer.neighbour) FindRoutes();
}

// This rank's link to `to` has ended. If `to` is not a neighbor, the other ranks are not told: they
// hear of its death from its neighbors.
void Overlay::EndedLink(int to, const Status& reason) {
  Peer& peer = At(to);
  if (!peer.left) {
    if (peer.neighbour) Lose(to, reason, -1);
    NoteLoss(to, reason);
    peer.error = reason;  // more precise than what others reported
  } else if (peer.error.ok()) {
    NoteLoss(to, reason);
    if (peer.neighbour) DoubtDelivery();
  }
}

void Overlay::NoteLoss(int lost, const Status& reason) {
  Peer& peer = At(lost);
  if (!peer.error.ok() || peer.closed) return;
  peer.error = reason;
  losses_.push_back(lost);
  arrived_ = true;
}

void Overlay::Lose(int lost, const Status& reason, int told_by) {
  Peer& peer = At(lost);
  if (peer.gone || peer.left) return;
  const bool believed = told_by < 0 || !StillHasLink(lost);
  if (believed) {
    peer.gone = true;
    NoteLoss(lost, reason);
    peer.unacknowledged.clear();
    FindRoutes();
  }
  if (std::exchange(peer.told, true)) return;
  FrameHeader header;
  header.type = kGone;
  header.generation = generation_;
  header.slice = static_cast<uint32_t>(lost);
  for (int neighbour : neighbours_) {
    const Peer& other = At(neighbour);
    const bool knows = neighbour == told_by || neighbour == lost;
    if (!knows && !other.gone && !other.closed) Queue(neighbour, {header, ""});
  }
  DoubtDelivery();
}

// Whether a rank that others report as gone still has its link to this one: then only a connection
// between two living ranks may have been cut. Pumps the link now, so that a rank that ends because
// of this loss is not noted before it.
bool Overlay::StillHasLink(int to) {
  Peer& peer = At(to);
  if (peer.link == nullptr || peer.ending) return false;
  bool moved = false;
  peer.ending = !peer.link->Pump(&moved).ok();
  arrived_ |= moved;
  return !peer.ending;
}

std::string Overlay::CountersJson() const {
  return "{\"neighbours\": " + std::to_string(neighbours_.size()) +
         ", \"sent\": " + std::to_string(counters_.sent) +
         ", \"relayed\": " + std::to_string(counters_.relayed) +
         ", \"repeated\": " + std::to_string(counters_.repeated) +
         ", \"dropped\": " + std::to_string(counters_.dropped) +
         ", \"adopted\": " + std::to_string(counters_.adopted) + "}";
}

void Overlay::DoubtDelivery() {
  if (!doubtful_) repeated_us_ = hooks_.now_us();
  doubtful_ = true;
  for (int peer = 0; peer < size_; ++peer) {
    if (At(peer).next_in > At(peer).acknowledged) Acknowledge(peer);
  }
}

void Overlay::Repeat() {
  const int64_t now_us = hooks_.now_us();
  if (now_us - repeated_us_ < kRepeatUs) return;
  repeated_us_ = now_us;
  for (int to = 0; to < size_; ++to) {
    // A copy: Forward may clear the list.
    const std::list<Letter> waiting = At(to).unacknowledged;
    for (const Letter& letter : waiting) {
      ++counters_.repeated;
      Forward(letter);
    }
  }
}

void Overlay::Close(int closed) {
  Peer& peer = At(closed);
  peer.closed = true;
  losses_.remove(closed);
  peer.link.reset();
  peer.unacknowledged.clear();
  peer.inbox.clear();
  if (!peer.neighbour) return;
  FindRoutes();
  std::list<Letter> waiting = std::move(peer.queue);
  peer.queue.clear();
  for (Letter& letter : waiting) {
    if (letter.header.phase > 0) Forward(std::move(letter));
  }
}

}  // namespace tfdist
