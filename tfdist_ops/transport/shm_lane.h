// One direction of one lane in shared memory: one producer, one consumer, no locks.
//
// Frames are announced in a ring of entries, in order; their payloads lie in slots, of which an
// entry names one. The producer takes any slot that is free, so a frame that is held for long costs
// one slot and does not stop the ring; and it takes the lowest, so that a consumer that keeps up
// sees the same few slots again and again, still in the cache.
//
// entry.laps: how often the entry has been published; position p is full when it is p / slots + 1.
// Only the producer writes it: there are as many entries as slots, so a free slot means that the
// next entry has been read. returned.count: how often the slot came back. Only the consumer
// writes it; a slot is free when the producer has used it as often. All-zero memory is an empty
// lane.
//
// Both words are stored and loaded sequentially consistent, because sleeping depends on it:
// "publish, then see whether the peer sleeps" here and "say that I sleep, then look again" there
// must not both miss. On x86 this costs the one locked store that a fence would cost too.
#ifndef TFDIST_OPS_TRANSPORT_SHM_LANE_H_
#define TFDIST_OPS_TRANSPORT_SHM_LANE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/link.h"

namespace tfdist {

constexpr size_t kCacheLine = 64;

struct alignas(kCacheLine) ShmEntry {
  std::atomic<uint64_t> laps;
  FrameHeader header;
  uint32_t slot;
};
struct alignas(kCacheLine) ShmReturned {
  std::atomic<uint64_t> count;
};
static_assert(sizeof(ShmEntry) == kCacheLine, "an entry is one cache line");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would be private to a process");

// Where things are. `base` is aligned to a cache line; `capacity`: payload bytes of a slot.
class ShmLane {
 public:
  ShmLane() = default;
  ShmLane(uint8_t* base, size_t slots, size_t capacity)
      : base_(base), slots_(slots), stride_(Stride(capacity)) {}

  static size_t Bytes(size_t slots, size_t capacity) {
    return slots * (sizeof(ShmEntry) + sizeof(ShmReturned) + Stride(capacity));
  }

  size_t slots() const { return slots_; }
  ShmEntry& entry(uint64_t position) const {
    return reinterpret_cast<ShmEntry*>(base_)[position % slots_];
  }
  ShmReturned& returned(size_t slot) const {
    return reinterpret_cast<ShmReturned*>(base_ + slots_ * sizeof(ShmEntry))[slot];
  }
  uint8_t* payload(size_t slot) const {
    return base_ + slots_ * (sizeof(ShmEntry) + sizeof(ShmReturned)) + slot * stride_;
  }

 private:
  static size_t Stride(size_t capacity) {
    return (capacity + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  uint8_t* base_ = nullptr;
  size_t slots_ = 0;
  size_t stride_ = 0;
};

enum class Look { kReady, kNotYet, kCorrupt };

class ShmProducer {
 public:
  ShmProducer() = default;
  explicit ShmProducer(const ShmLane& lane)
      : lane_(lane), uses_(lane.slots()), slot_(lane.slots()) {}

  // Whether there is a free slot; the one found stays the next one until Publish.
  Look FindSlot() {
    for (size_t slot = 0; slot_ == lane_.slots() && slot < lane_.slots(); ++slot) {
      const uint64_t count = lane_.returned(slot).count.load(std::memory_order_seq_cst);
      if (count == uses_[slot]) {
        slot_ = slot;
      } else if (count + 1 != uses_[slot]) {
        return Look::kCorrupt;
      }
    }
    return slot_ < lane_.slots() ? Look::kReady : Look::kNotYet;
  }
  uint8_t* payload() const { return lane_.payload(slot_); }
  void Publish(const FrameHeader& header) {
    ShmEntry& entry = lane_.entry(position_);
    entry.header = header;
    entry.slot = static_cast<uint32_t>(slot_);
    entry.laps.store(position_ / lane_.slots() + 1, std::memory_order_seq_cst);
    ++position_;
    ++uses_[slot_];
    slot_ = lane_.slots();
  }

 private:
  ShmLane lane_;
  std::vector<uint64_t> uses_;  // of each slot
  size_t slot_ = 0;             // found and not yet published; slots(): none
  uint64_t position_ = 0;
};

class ShmConsumer {
 public:
  ShmConsumer() = default;
  explicit ShmConsumer(const ShmLane& lane)
      : lane_(lane), returns_(lane.slots()), held_(lane.slots(), false) {}

  // Copies the next entry out, before anybody checks it: the peer could change it in between.
  // kCorrupt: what is there cannot have come from a sound peer.
  Look Take(FrameHeader* header, size_t* slot) {
    const ShmEntry& entry = lane_.entry(position_);
    const uint64_t laps = entry.laps.load(std::memory_order_seq_cst);
    const uint64_t before = position_ / lane_.slots();
    if (laps == before) return Look::kNotYet;
    *header = entry.header;
    *slot = entry.slot;
    if (laps != before + 1 || *slot >= lane_.slots() || held_[*slot]) return Look::kCorrupt;
    held_[*slot] = true;
    ++position_;
    return Look::kReady;
  }
  const uint8_t* payload(size_t slot) const { return lane_.payload(slot); }
  void Release(size_t slot) {
    held_[slot] = false;
    lane_.returned(slot).count.store(++returns_[slot], std::memory_order_seq_cst);
  }

 private:
  ShmLane lane_;
  std::vector<uint64_t> returns_;  // of each slot
  std::vector<bool> held_;
  uint64_t position_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_SHM_LANE_H_
