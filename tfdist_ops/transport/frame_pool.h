// FramePool: memory for frames of one lane, reused, for the transports without shared memory.
#ifndef TFDIST_OPS_TRANSPORT_FRAME_POOL_H_
#define TFDIST_OPS_TRANSPORT_FRAME_POOL_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "transport/link.h"

namespace tfdist {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

// A frame as it goes over the wire: a header of 64 bytes (tcp: WireHeader of frame_mac.h)
// and the payload, adjacent, each aligned to a cache line.
class FrameBuffer {
 public:
  FrameBuffer() = default;
  explicit FrameBuffer(size_t capacity)
      : memory_(static_cast<uint8_t*>(std::aligned_alloc(kAlign, Rounded(kAlign + capacity)))) {}

  explicit operator bool() const { return memory_ != nullptr; }
  uint8_t* payload() const { return memory_.get() + kAlign; }
  uint8_t* wire() const { return memory_.get(); }

 private:
  static constexpr size_t kAlign = 64;
  static size_t Rounded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  std::unique_ptr<uint8_t, FreeDeleter> memory_;
};

class FramePool {
 public:
  explicit FramePool(size_t capacity) : capacity_(capacity) {}

  // Returns a buffer that converts to false if there is no memory.
  FrameBuffer Take() {
    if (free_.empty()) return FrameBuffer(capacity_);
    FrameBuffer buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }
  void Give(FrameBuffer buffer) {
    if (buffer && free_.size() < kMostKept) free_.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kMostKept = 32;

  size_t capacity_;
  std::vector<FrameBuffer> free_;
};

// Frames that were polled and not released, by token. Tokens are small and reused.
class HeldFrames {
 public:
  uint64_t Hold(FrameBuffer buffer) {
    if (free_tokens_.empty()) {
      held_.push_back(std::move(buffer));
      return held_.size() - 1;
    }
    const uint64_t token = free_tokens_.back();
    free_tokens_.pop_back();
    held_[token] = std::move(buffer);
    return token;
  }
  FrameBuffer Drop(uint64_t token) {
    free_tokens_.push_back(token);
    return std::move(held_[token]);
  }

 private:
  std::vector<FrameBuffer> held_;
  std::vector<uint64_t> free_tokens_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_FRAME_POOL_H_
