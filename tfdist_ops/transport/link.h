// Link: framed bytes between this rank and one peer, full duplex, never blocking.
//
// A frame is a FrameHeader and a payload. Two lanes: kControl (negotiation, errors; small) and
// kData (segments of collectives); each lane keeps the order in which frames were sent, and a full
// data lane never holds up the control lane. A link belongs to the one thread that drives it (the
// progress thread); nothing here takes a lock on that path.
//
// Sending writes straight into the transport's memory: BeginSend hands out room for the payload
// (empty: the lane is full, try again after the next Pump), CommitSend publishes it. Receiving
// hands out views: Poll returns the next unread frame, which stays valid until Release, in
// whatever order frames are released. Held frames take up the peer's room (shared memory) or
// memory of this rank (tcp), so when frames that must wait fill up a lane, the engine copies them.
#ifndef TFDIST_OPS_TRANSPORT_LINK_H_
#define TFDIST_OPS_TRANSPORT_LINK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/span.h"
#include "base/status.h"

namespace tfdist {

enum class Lane : uint8_t { kControl = 0, kData = 1 };

// Whether this rank polls for frames, or else what must wake it.
enum class WakeMode : uint8_t {
  kAwake,  // it polls
  // It polls, and expects idle peers to poll soon too: a control frame need not wake an idle peer
  // until this rank leaves this mode, as it must.
  kExpecting,
  // Control frames wake it, and room in a control lane that was full. Nothing here waits for data,
  // except a thread that does its own polling.
  kIdle,
  kAsleep,  // all frames wake it, and room in a lane that was full
};
inline bool Looks(WakeMode mode) {
  return mode == WakeMode::kAwake || mode == WakeMode::kExpecting;
}

// 32 bytes, host order (ranks of different byte order are refused in the handshake).
struct FrameHeader {
  uint32_t payload_bytes = 0;
  uint8_t lane = 0;
  uint8_t type = 0;         // control: FrameType of scheduler/wire.h; data: 0
  uint16_t phase = 0;       // data: phase of the step (collective/schedule.h)
  uint64_t ticket = 0;      // data: name of the collective (scheduler/ticket_order.h)
  uint32_t slice = 0;       // data: slice of the step
  uint32_t segment = 0;     // data: segment of the slice; control: 1 = more fragments follow
  uint32_t generation = 0;  // of the world; a frame of another generation is an error
  uint32_t set = 0;         // process set that the ticket or the message belongs to
};
static_assert(sizeof(FrameHeader) == 32, "the header is a wire format");

constexpr size_t kMaxControlPayload = 480;  // a control slot is 512 bytes with its header

// A payload that lies in several places, in the order in which it is sent.
using Pieces = Span<const ByteSpan>;

struct InFrame {
  FrameHeader header;
  ByteSpan payload;
  uint64_t token = 0;     // the transport's own handle, for Release
  bool streamed = false;  // the payload was written past the caches (write_policy.h)
};

// A descriptor that a sleeping rank watches: for reading, and for writing too.
struct Watched {
  int fd;
  bool write;
};

class Link {
 public:
  virtual ~Link() = default;

  virtual int peer() const = 0;
  virtual const char* transport() const = 0;  // "inproc", "shm", "tcp", "mpi"; "relayed": overlay.h

  // Room for one payload of `bytes` (<= kMaxControlPayload, or <= segment_bytes on the data lane);
  // data() is null when the lane is full now. At most one BeginSend may be open on a lane.
  // With bytes == 0, data() is non-null when there is room.
  virtual MutableByteSpan BeginSend(Lane lane, size_t bytes) = 0;
  // Publishes the open send; fills in payload_bytes and lane itself. It is best to fill in the rest
  // of `header` before writing the payload: a wide load of a header that was just written field by
  // field stalls until these stores, and all stores before them, have reached the cache.
  virtual void CommitSend(Lane lane, const FrameHeader& header) = 0;
  // Whether the payload of the open send of the data lane should be written past the caches
  // (write_policy.h).
  virtual bool StreamsSend() const { return false; }

  // The memory that the data lane sends from, where several links of this rank share it; else null.
  // ShareSend sends to this link's peer, without a copy, the payload that another link with the
  // same memory has committed last. False: the lane is full now.
  virtual const void* SendMemory() const { return nullptr; }
  virtual bool ShareSend(const FrameHeader& /*header*/, size_t /*bytes*/) { return false; }
  // Most pieces of a payload that SendPieces takes; 0: this link has no SendPieces.
  virtual size_t MostPieces() const { return 0; }
  // Sends a frame of the data lane from the caller's memory, which may change as soon as this
  // returns: for transports that would copy a packed payload once more. False: the lane is full.
  virtual bool SendPieces(const FrameHeader& /*header*/, Pieces /*payload*/) { return false; }

  // Whether there is an unread frame, where that can be told at once; else false.
  virtual bool HasFrame() const { return false; }
  // Next unread frame of the lane. False: none now.
  virtual bool Poll(Lane lane, InFrame* frame) = 0;
  virtual void Release(Lane lane, const InFrame& frame) = 0;
  // Tells the sender how long it took to read a frame of the data lane. Call it before Release.
  virtual void NoteRead(const InFrame& /*frame*/, int64_t /*ns*/) {}

  // Moves bytes where the transport has to (tcp), looks whether the peer is still there. Sets
  // *moved when anything happened. An error is final: the peer is lost (kAborted), or it sent
  // garbage (kAborted, saying so). Frames that arrived before the loss can still be polled.
  virtual Status Pump(bool* moved) = 0;

  // For epoll: a descriptor that becomes readable when Pump has something to do (-1: none), and
  // whether it must be watched for writing too.
  virtual int fd() const = 0;
  virtual bool WantsWrite() const = 0;
  // Adds all such descriptors, where there may be several.
  virtual void Watch(std::vector<Watched>* watched) const {
    if (fd() >= 0) watched->push_back({fd(), WantsWrite()});
  }

  // Tells the peer whether this rank needs its doorbell rung after a CommitSend or a Release. The
  // caller polls once more before it really sleeps. Cheap when nothing changes.
  virtual void SetWakeMode(WakeMode mode) = 0;

  // True when everything committed has left this process (tcp: is in the kernel's hands).
  virtual bool Flushed() const = 0;

  // Most frames of the data lane that can be held unreleased; beyond that, no more arrive.
  virtual size_t MaxHeld() const = 0;

  // Whether the two ranks have a connection of their own. Else (overlay.h) control frames are
  // relayed, and data waits until there is one.
  virtual bool Direct() const { return true; }
  // The peer has said goodbye: it relays only what has no other route.
  virtual void PeerLeaves() {}
  // Two ranks of a host share a memory word for each of them, so that a stopped process can be
  // excluded safely. BarPeer bars the peer, and returns whether it can no longer decide on a
  // verdict in this world; false if it already has, or if the link has no such word. ClaimVerdict
  // is called by a rank before it decides; false if the peer has barred it.
  virtual bool BarPeer() { return false; }
  virtual bool ClaimVerdict() { return true; }
  // Whether the peer's process is on this host and is to be watched in addition to the connection.
  virtual bool WatchProcess() const { return false; }

  // Payload bytes and frames sent on the data lane, for tests and statistics.
  uint64_t data_bytes_sent() const { return data_bytes_sent_; }
  uint64_t data_frames_sent() const { return data_frames_sent_; }

 protected:
  uint64_t data_bytes_sent_ = 0;
  uint64_t data_frames_sent_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_LINK_H_
