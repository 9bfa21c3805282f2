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
// whatever order frames are released. Held frames use up the peer's room (shared memory) or memory
// (tcp), so the engine copies out what stands still while it fills up a lane.
#ifndef TFDIST_OPS_TRANSPORT_LINK_H_
#define TFDIST_OPS_TRANSPORT_LINK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/span.h"
#include "base/status.h"

namespace tfdist {

enum class Lane : uint8_t { kControl = 0, kData = 1 };

// Whether this rank looks for frames by itself, and else for what it is to be woken.
enum class WakeMode : uint8_t {
  kAwake,  // it looks
  // It looks, and expects that idle peers soon do too: its control frames may let them rest until
  // another word follows, as it has to.
  kExpecting,
  kIdle,    // for control frames. Nothing that runs here waits for data, or who waits for it looks.
  kAsleep,  // for all frames, and for room in a lane that was full
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
  // Publishes the open send; fills in payload_bytes and lane itself. The rest of `header` is best
  // made before the payload is written: what a processor has written in parts it reads as a whole
  // only when these parts, and all that it wrote before them, have left for its cache.
  virtual void CommitSend(Lane lane, const FrameHeader& header) = 0;
  // Whether the payload of the open send of the data lane should be written past the caches
  // (write_policy.h).
  virtual bool StreamsSend() const { return false; }

  // The memory that the data lane sends from, where several links of this rank share it; else null.
  // ShareSend sends to this link's peer, without a copy, the payload that another link with the
  // same memory has committed last. False: the lane is full now.
  virtual const void* SendMemory() const { return nullptr; }
  virtual bool ShareSend(const FrameHeader& /*header*/, size_t /*bytes*/) { return false; }
  // Most pieces of a payload that SendPieces takes; 0: this link has only the way above.
  virtual size_t MostPieces() const { return 0; }
  // Sends a frame of the data lane from the caller's memory, which may change as soon as this
  // returns: for transports that would copy a packed payload once more. False: the lane is full.
  virtual bool SendPieces(const FrameHeader& /*header*/, Pieces /*payload*/) { return false; }

  // Whether there is an unread frame, where that can be told at once; else false.
  virtual bool HasFrame() const { return false; }
  // Next unread frame of the lane. False: none now.
  virtual bool Poll(Lane lane, InFrame* frame) = 0;
  virtual void Release(Lane lane, const InFrame& frame) = 0;
  // Before its Release: how long it took to read a frame of the data lane, for its sender.
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

  // Most frames of the data lane that can be held unreleased; then none comes any more.
  virtual size_t MaxHeld() const = 0;

  // Whether the two ranks have a connection of their own. Else (overlay.h) control frames are
  // relayed, and data waits until there is one.
  virtual bool Direct() const { return true; }
  // The peer has said goodbye: it is not to relay anything any more.
  virtual void PeerLeaves() {}
  // Two ranks of a host share a word for each of them, so that a stopped process can be left behind
  // for certain. BarPeer: whether the peer can no longer decide on a verdict in this world; false
  // where it already has, or where the link has no such word. ClaimVerdict: called by a rank before
  // it decides; false when the peer has barred it.
  virtual bool BarPeer() { return false; }
  virtual bool ClaimVerdict() { return true; }
  // Whether the peer's process is on this host and is to be watched beside the connection.
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
