// ShmWindow: the memory from which the ranks of a host read what one of them sends. Every rank has
// one; all its links put their payloads there, so that one that goes to several peers is written
// once. Others map it for reading.
#ifndef TFDIST_OPS_TRANSPORT_SHM_WINDOW_H_
#define TFDIST_OPS_TRANSPORT_SHM_WINDOW_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/config.h"
#include "base/status.h"
#include "transport/shm_lane.h"

namespace tfdist {

// A memory file in this process' address space, unmapped with its owner. A forked child does not
// inherit it: two processes playing the same rank would corrupt the lanes.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // All of the file, whose size must be final: a peer that shrank it would kill us with SIGBUS.
  Status Map(int fd, bool writable);
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

class ShmWindow {
 public:
  // The own window of a rank; does not keep `fd`.
  static StatusOr<std::shared_ptr<ShmWindow>> Make(int fd, const Config& config);

  const std::shared_ptr<SlotPool>& pool() const { return pool_; }
  // The slot of the last frame that any link has sent.
  size_t last() const { return last_; }
  void set_last(size_t slot) { last_ = slot; }

 private:
  SharedMemory memory_;
  std::shared_ptr<SlotPool> pool_;
  size_t last_ = 0;
};

// The payloads of a window that `memory` maps; an error when it has no whole number of slots, or
// none.
StatusOr<ShmPayloads> WindowPayloads(const SharedMemory& memory, const Config& config);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_SHM_WINDOW_H_
