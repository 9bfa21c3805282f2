// ControlLane: control messages between this rank and its peers, cut into frames on their way out
// and put together again on their way in. What they mean is the receiver's business.
#ifndef TFDIST_OPS_SCHEDULER_CONTROL_LANE_H_
#define TFDIST_OPS_SCHEDULER_CONTROL_LANE_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/span.h"
#include "membership/heartbeat.h"
#include "scheduler/operation.h"
#include "scheduler/process_set.h"
#include "scheduler/wire.h"
#include "scheduler/world.h"

namespace tfdist {

class ControlLane {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void OnControlMessage(int peer, FrameType type, uint32_t set, ByteSpan message,
                                  int64_t now_us) = 0;
    // Something of another generation, or a message that is too long.
    virtual void OnBadControlFrame(int peer, int64_t now_us) = 0;
  };

  // All must outlive the lane. The receiver may end links.
  ControlLane(const World& world, const Links& links, HeartbeatMonitor* monitor,
              Receiver* receiver);

  // Puts a message in the queue of a peer; nothing happens when its link is gone.
  void Send(int peer, FrameType type, uint32_t set, std::string bytes);
  void SendToAll(FrameType type, const std::string& bytes);
  // To the other members of a set.
  void SendToMembers(const ProcessSet& set, FrameType type, const std::string& bytes);
  // Hands the links what they take of the queues. True: something moved.
  bool Flush(int peer);
  bool FlushAll();
  // Reads what has come from a peer. True: something has.
  bool Read(int peer, int64_t now_us);

  bool IsConnected(int peer) const { return links_[static_cast<size_t>(peer)] != nullptr; }
  bool HasQueued(int peer) const { return !outbound_[static_cast<size_t>(peer)].messages.empty(); }
  int64_t CountQueued(int peer, FrameType type) const;
  void DiscardQueue(int peer) { outbound_[static_cast<size_t>(peer)] = Outbound{}; }
  // How many messages this rank has sent to agree on operations.
  uint64_t negotiation_messages() const { return negotiation_messages_; }

 private:
  struct Message {
    FrameType type;
    uint32_t set;
    std::string bytes;
  };
  struct Outbound {
    std::deque<Message> messages;
    size_t offset = 0;  // of the first message
  };

  const World& world_;
  const Links& links_;
  HeartbeatMonitor* const monitor_;
  Receiver* const receiver_;
  std::vector<Outbound> outbound_;      // by peer
  std::vector<std::string> assembled_;  // by peer: fragments of a message
  uint64_t negotiation_messages_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_CONTROL_LANE_H_
