#include "scheduler/control_lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tfdist {
namespace {

constexpr size_t kMaxControlMessage = size_t{64} << 20;
constexpr int kMessagesPerTurn = 256;
constexpr uint32_t kMoreFragments = 1;

}  // namespace

ControlLane::ControlLane(const World& world, const Links& links, HeartbeatMonitor* monitor,
                         Receiver* receiver)
    : world_(world),
      links_(links),
      monitor_(monitor),
      receiver_(receiver),
      outbound_(links.size()),
      assembled_(links.size()) {}

// ---- sending ----

void ControlLane::Send(int peer, FrameType type, uint32_t set, std::string bytes) {
  if (!IsConnected(peer)) return;
  const bool agrees_on_work = type != FrameType::kLeave && type != FrameType::kLeaveAck &&
                              (type < FrameType::kBeat || type > FrameType::kGate) &&
                              type != FrameType::kClock && type < FrameType::kTimeline;
  if (agrees_on_work) ++negotiation_messages_;
  outbound_[static_cast<size_t>(peer)].messages.push_back({type, set, std::move(bytes)});
}

void ControlLane::SendToAll(FrameType type, const std::string& bytes) {
  for (size_t p = 0; p < links_.size(); ++p) Send(static_cast<int>(p), type, kWorldSet, bytes);
}

void ControlLane::SendToMembers(const ProcessSet& set, FrameType type, const std::string& bytes) {
  for (int32_t rank : set.ranks) {
    if (rank != world_.rank) Send(rank, type, set.id, bytes);
  }
}

bool ControlLane::Flush(int peer) {
  const auto p = static_cast<size_t>(peer);
  Outbound& out = outbound_[p];
  bool moved = false;
  while (!out.messages.empty()) {
    const Message& message = out.messages.front();
    const size_t bytes = std::min(kMaxControlPayload, message.bytes.size() - out.offset);
    const MutableByteSpan room = links_[p]->BeginSend(Lane::kControl, bytes);
    if (room.data() == nullptr) break;
    FrameHeader header;
    header.type = static_cast<uint8_t>(message.type);
    header.set = message.set;
    header.generation = world_.generation;
    header.segment = out.offset + bytes < message.bytes.size() ? kMoreFragments : 0;
    std::memcpy(room.data(), message.bytes.data() + out.offset, bytes);
    out.offset += bytes;
    links_[p]->CommitSend(Lane::kControl, header);
    moved = true;
    if (header.segment == 0) {
      out.messages.pop_front();
      out.offset = 0;
    }
  }
  return moved;
}

bool ControlLane::FlushAll() {
  bool moved = false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr || outbound_[p].messages.empty()) continue;
    moved |= Flush(static_cast<int>(p));
  }
  return moved;
}

int64_t ControlLane::CountQueued(int peer, FrameType type) const {
  const std::deque<Message>& queue = outbound_[static_cast<size_t>(peer)].messages;
  return std::count_if(queue.begin(), queue.end(),
                       [type](const Message& message) { return message.type == type; });
}

// ---- receiving ----

bool ControlLane::Read(int peer, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  bool moved = false;
  InFrame frame;
  for (int n = 0; n < kMessagesPerTurn && links_[p] != nullptr; ++n) {
    if (!links_[p]->Poll(Lane::kControl, &frame)) break;
    moved = true;
    std::string& message = assembled_[p];
    message.append(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
    const FrameHeader header = frame.header;
    links_[p]->Release(Lane::kControl, frame);
    monitor_->OnFrame(peer);
    if (header.generation != world_.generation || message.size() > kMaxControlMessage) {
      message.clear();
      receiver_->OnBadControlFrame(peer, now_us);
      continue;
    }
    if (header.segment == kMoreFragments) continue;
    const std::string whole = std::move(message);
    message.clear();
    receiver_->OnControlMessage(peer, static_cast<FrameType>(header.type), header.set,
                                AsBytes(whole), now_us);
  }
  return moved;
}

}  // namespace tfdist
