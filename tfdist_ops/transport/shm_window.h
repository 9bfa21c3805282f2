// ShmWindow: the memory from which the other ranks of a host read the data that one rank sends.
// Every rank has one; all its links put the payloads of their data lanes there, so that a payload
// for several peers is written once. The other ranks map it for reading.
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
  // This rank's own window; does not keep `fd`.
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

// The payloads of the window that `memory` maps; an error if its size is not a positive multiple
// of WindowBytes().
StatusOr<ShmPayloads> WindowPayloads(const SharedMemory& memory, const Config& config);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_SHM_WINDOW_H_
