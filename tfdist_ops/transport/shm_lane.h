// One direction of one lane in shared memory: one producer, one consumer, no locks.
//
// Frames are announced in a ring of entries, in order. An entry names a handle, which the consumer
// gives back when it is done, and a slot, where the payload lies. The producer takes any handle and
// any slot that is free, so a frame that is held for long costs one of each and does not stop the
// ring. It takes the slots in turn, and writes small payloads to different places in a slot: a
// cache line that the consumer has just read is still in its processor's own cache, and must be
// invalidated there to be written again, which takes longer than to write a line that was evicted
// to the cache that both share (docs/design/0009).
//
// Slots belong to one lane, or to all lanes of a rank's window (SlotPool). In a window, one payload
// can go out on several lanes, and its slot is free when all of them have given it back.
//
// entry.laps: how often the entry has been published; position p is full when it is p / handles +
// 1. Only the producer writes it: there are as many entries as handles, so a free handle means that
// the next entry has been read. returned.count: how often the handle came back. Only the consumer
// writes it; a handle is free when the producer has used it as often. All-zero memory is an empty
// lane.
//
// Both words are stored and loaded with sequential consistency, because sleeping depends on it:
// "publish, then see whether the peer sleeps" here and "say that I sleep, then look again" there
// must not both miss, as in Dekker's algorithm (E. W. Dijkstra, "Cooperating sequential processes",
// 1965). On x86 this costs the one locked store that a fence would cost too.
#ifndef TFDIST_OPS_TRANSPORT_SHM_LANE_H_
#define TFDIST_OPS_TRANSPORT_SHM_LANE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/link.h"
#include "transport/write_policy.h"

namespace tfdist {

constexpr size_t kCacheLine = 64;

struct alignas(kCacheLine) ShmEntry {
  std::atomic<uint64_t> laps;
  FrameHeader header;
  uint32_t handle;
  uint32_t slot;
  uint32_t offset;    // of the payload in the slot
  uint32_t streamed;  // 1: the payload was written past the caches
};
struct alignas(kCacheLine) ShmReturned {
  std::atomic<uint64_t> count;
  std::atomic<uint32_t> read_ns;  // time to read the payload; 0: not known
};
static_assert(sizeof(ShmEntry) == kCacheLine, "an entry is one cache line");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would be private to a process");

// Payloads of `capacity` bytes each, `slots` of them, from `base` on, aligned to a cache line.
class ShmPayloads {
 public:
  ShmPayloads() = default;
  ShmPayloads(uint8_t* base, size_t slots, size_t capacity)
      : base_(base), slots_(slots), stride_(Stride(capacity)) {}

  static size_t Bytes(size_t slots, size_t capacity) { return slots * Stride(capacity); }
  size_t slots() const { return slots_; }
  size_t stride() const { return stride_; }
  uint8_t* at(size_t slot) const { return base_ + slot * stride_; }

 private:
  static size_t Stride(size_t capacity) {
    return (capacity + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  uint8_t* base_ = nullptr;
  size_t slots_ = 0;
  size_t stride_ = 0;
};

// The entries and the counts of a lane; `base` is aligned to a cache line.
class ShmLane {
 public:
  ShmLane() = default;
  ShmLane(uint8_t* base, size_t handles) : base_(base), handles_(handles) {}

  static size_t Bytes(size_t handles) { return handles * (sizeof(ShmEntry) + sizeof(ShmReturned)); }
  size_t handles() const { return handles_; }
  ShmEntry& entry(uint64_t position) const {
    return reinterpret_cast<ShmEntry*>(base_)[position % handles_];
  }
  ShmReturned& returned(size_t handle) const {
    return reinterpret_cast<ShmReturned*>(base_ + handles_ * sizeof(ShmEntry))[handle];
  }

 private:
  uint8_t* base_ = nullptr;
  size_t handles_ = 0;
};

// Slots, each of which may be out on several lanes. For one thread at a time.
class SlotPool {
 public:
  explicit SlotPool(const ShmPayloads& payloads)
      : payloads_(payloads),
        out_(payloads.slots(), 0),
        offsets_(payloads.slots(), 0),
        ends_(payloads.slots(), 0),
        streamed_(payloads.slots(), false),
        turns_(std::clamp<size_t>(kSpreadBytes / payloads.stride(), 1, payloads.slots())) {}
  const ShmPayloads& payloads() const { return payloads_; }
  // The next slot that is out on no lane; slots(): none.
  size_t Next() const {
    for (size_t i = 0; i < turns_; ++i) {
      const size_t slot = (turn_ + i) % turns_;
      if (out_[slot] == 0) return slot;
    }
    const auto rest = out_.begin() + static_cast<ptrdiff_t>(turns_);
    return static_cast<size_t>(std::find(rest, out_.end(), 0u) - out_.begin());
  }
  // Where the next payload lies in a slot that is out on no lane: behind the one before, if there
  // is room. `streamed`: it is written past the caches.
  void Place(size_t slot, size_t bytes, bool streamed) {
    const size_t behind = (ends_[slot] + kCacheLine - 1) / kCacheLine * kCacheLine;
    offsets_[slot] = behind + std::max<size_t>(bytes, 1) <= payloads_.stride() ? behind : 0;
    ends_[slot] = offsets_[slot] + bytes;
    streamed_[slot] = streamed;
  }
  bool streamed(size_t slot) const { return streamed_[slot]; }
  size_t offset(size_t slot) const { return offsets_[slot]; }
  void Out(size_t slot) {
    ++out_[slot];
    if (slot < turns_) turn_ = slot + 1;
  }
  void Back(size_t slot) { --out_[slot]; }

 private:
  // More than a processor's own cache, less than what several share.
  static constexpr size_t kSpreadBytes = size_t{2} << 20;

  ShmPayloads payloads_;
  // By slot:
  std::vector<uint32_t> out_;  // lanes
  std::vector<size_t> offsets_;
  std::vector<size_t> ends_;  // of the payload that was last there
  std::vector<bool> streamed_;
  size_t turns_ = 1;  // slots that are taken in turns; the others when all of these are out
  size_t turn_ = 0;
};

enum class Look { kReady, kNotYet, kCorrupt };

class ShmProducer {
 public:
  ShmProducer() = default;
  ShmProducer(const ShmLane& lane, std::shared_ptr<SlotPool> pool, const WritePolicy& choice)
      : lane_(lane),
        pool_(std::move(pool)),
        uses_(lane.handles(), 0),
        sent_(lane.handles(), kNone),
        written_(lane.handles()),
        choice_(choice) {}

  // Whether there is room for a frame; the slot that was found is kept until Publish.
  Look Find() {
    const Look look = FindHandle();
    if (look != Look::kReady || slot_ != kNone) return look;
    size_t slot = pool_->Next();
    if (slot == pool_->payloads().slots()) {
      if (!Reap()) return Look::kCorrupt;
      slot = pool_->Next();
      if (slot == pool_->payloads().slots()) return Look::kNotYet;
    }
    slot_ = slot;
    return Look::kReady;
  }
  // Returns where to write the payload. Call it before the payload is written.
  uint8_t* Begin(size_t bytes) {
    writing_.streamed = choice_.Next(bytes);
    pool_->Place(slot_, bytes, writing_.streamed);
    writing_.begin_ns = bytes >= kTimedBytes ? NowNs() : 0;
    return pool_->payloads().at(slot_) + pool_->offset(slot_);
  }
  // A payload of the consumer's own lane has come.
  void Saw(bool streamed, size_t bytes) { choice_.Saw(streamed, bytes); }
  // Whether it is to be written past the caches.
  bool streams() const { return writing_.streamed; }
  // Returns the slot. `bytes` and `lane` replace payload_bytes and lane of the header.
  size_t Publish(const FrameHeader& header, Lane lane, uint32_t bytes) {
    const size_t slot = std::exchange(slot_, kNone);
    if (bytes >= kTimedBytes) {
      writing_.phase = header.phase;
      writing_.bytes = bytes;
      writing_.ns = NowNs() - writing_.begin_ns;
    }
    Announce(header, lane, bytes, slot, std::exchange(writing_, {}));
    return slot;
  }
  // Whether a handle is free, with which Announce can send what another lane of the pool has put
  // into a slot. Looks for returned handles only when none is free: each count is a cache line that
  // must be fetched from the consumer's processor.
  Look FindHandle() {
    if (HasHandle()) return Look::kReady;
    if (!Reap()) return Look::kCorrupt;
    return HasHandle() ? Look::kReady : Look::kNotYet;
  }
  void Announce(const FrameHeader& header, Lane lane, uint32_t bytes, size_t slot) {
    Announce(header, lane, bytes, slot, {});
  }
  // Takes back the returned handles. False: a count that a correct consumer cannot have written.
  bool Reap() {
    for (size_t handle = 0; handle < sent_.size(); ++handle) {
      if (sent_[handle] == kNone) continue;
      const uint64_t count = lane_.returned(handle).count.load(std::memory_order_seq_cst);
      if (count == uses_[handle]) {
        pool_->Back(std::exchange(sent_[handle], kNone));
        Weigh(handle);
      } else if (count + 1 != uses_[handle]) {
        return false;
      }
    }
    return true;
  }
  // Whether the consumer still has what was announced last.
  bool Unread() const {
    return announced_ != kNone &&
           lane_.returned(announced_).count.load(std::memory_order_relaxed) != uses_[announced_];
  }
  // The consumer is gone: nothing comes back.
  void Drop() {
    for (size_t& slot : sent_) {
      if (slot != kNone) pool_->Back(std::exchange(slot, kNone));
    }
  }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  // How a payload was written; 0 bytes: it is not timed.
  struct Written {
    bool streamed = false;
    uint16_t phase = 0;
    uint32_t bytes = 0;
    int64_t begin_ns = 0;
    int64_t ns = 0;
  };

  void Announce(const FrameHeader& header, Lane lane, uint32_t bytes, size_t slot,
                const Written& written) {
    const auto handle =
        static_cast<size_t>(std::find(sent_.begin(), sent_.end(), kNone) - sent_.begin());
    ShmEntry& entry = lane_.entry(position_);
    entry.header = header;
    entry.header.payload_bytes = bytes;
    entry.header.lane = static_cast<uint8_t>(lane);
    entry.handle = static_cast<uint32_t>(handle);
    entry.slot = static_cast<uint32_t>(slot);
    entry.offset = static_cast<uint32_t>(pool_->offset(slot));
    entry.streamed = pool_->streamed(slot) ? 1 : 0;
    entry.laps.store(position_ / lane_.handles() + 1, std::memory_order_seq_cst);
    ++position_;
    ++uses_[handle];
    announced_ = handle;
    sent_[handle] = slot;
    written_[handle] = written;
    pool_->Out(slot);
  }

  bool HasHandle() const { return std::find(sent_.begin(), sent_.end(), kNone) != sent_.end(); }

  // Tells the choice what a payload has cost both ranks.
  void Weigh(size_t handle) {
    const Written& written = written_[handle];
    if (written.bytes == 0) return;
    const uint32_t read_ns = lane_.returned(handle).read_ns.load(std::memory_order_relaxed);
    choice_.Add(written.streamed, written.phase, written.bytes,
                read_ns > 0 ? written.ns + read_ns : 0);
  }

  ShmLane lane_;
  std::shared_ptr<SlotPool> pool_;
  std::vector<uint64_t> uses_;  // of each handle
  std::vector<size_t> sent_;    // slot of each handle; kNone: it is here
  std::vector<Written> written_;
  Written writing_;           // the payload that is not yet published
  size_t slot_ = kNone;       // found and not yet published
  size_t announced_ = kNone;  // the handle that was announced last
  WritePolicy choice_;
  uint64_t position_ = 0;
};

// A frame as it was announced.
struct ShmFrame {
  FrameHeader header;
  size_t handle = 0;
  const uint8_t* payload = nullptr;
  bool streamed = false;
};

class ShmConsumer {
 public:
  ShmConsumer() = default;
  ShmConsumer(const ShmLane& lane, const ShmPayloads& payloads)
      : lane_(lane),
        payloads_(payloads),
        returns_(lane.handles(), 0),
        held_(lane.handles(), false) {}

  // Whether there is a next entry; a relaxed load, which orders nothing.
  bool Ready() const {
    return lane_.entry(position_).laps.load(std::memory_order_relaxed) !=
           position_ / lane_.handles();
  }
  // Copies the next entry out, before anybody checks it: the peer could change it in between.
  // kCorrupt: a correct peer cannot have written this entry.
  Look Take(ShmFrame* frame) {
    const ShmEntry& entry = lane_.entry(position_);
    const uint64_t laps = entry.laps.load(std::memory_order_seq_cst);
    const uint64_t before = position_ / lane_.handles();
    if (laps == before) return Look::kNotYet;
    frame->header = entry.header;
    frame->handle = entry.handle;
    const size_t slot = entry.slot;
    const size_t offset = entry.offset;
    if (laps != before + 1 || frame->handle >= lane_.handles() || held_[frame->handle] ||
        slot >= payloads_.slots() || !Fits(offset, frame->header.payload_bytes)) {
      return Look::kCorrupt;
    }
    frame->payload = payloads_.at(slot) + offset;
    frame->streamed = entry.streamed != 0;
    held_[frame->handle] = true;
    ++position_;
    return Look::kReady;
  }
  // Before Release: how long it took to read the payload.
  void NoteRead(size_t handle, int64_t ns) {
    read_ns_ = static_cast<uint32_t>(std::clamp<int64_t>(ns, 0, kMostNs));
    lane_.returned(handle).read_ns.store(read_ns_, std::memory_order_relaxed);
  }
  void Release(size_t handle) {
    ShmReturned& returned = lane_.returned(handle);
    if (std::exchange(read_ns_, 0) == 0) returned.read_ns.store(0, std::memory_order_relaxed);
    held_[handle] = false;
    returned.count.store(++returns_[handle], std::memory_order_seq_cst);
  }

 private:
  static constexpr int64_t kMostNs = 1'000'000'000;

  // A payload that is too long for any slot is the caller's to refuse.
  bool Fits(size_t offset, size_t bytes) const {
    const size_t stride = payloads_.stride();
    return offset < stride && (bytes > stride || bytes <= stride - offset);
  }

  ShmLane lane_;
  ShmPayloads payloads_;
  std::vector<uint64_t> returns_;  // of each handle
  std::vector<bool> held_;
  uint32_t read_ns_ = 0;  // of the handle that is released next
  uint64_t position_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_SHM_LANE_H_
