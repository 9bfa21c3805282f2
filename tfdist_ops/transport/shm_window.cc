#include "transport/shm_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "transport/link_support.h"
#include "transport/transport.h"

namespace tfdist {

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Status SharedMemory::Map(int fd, bool writable) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return SystemError("size of the shared memory");
  // Adding seals fails if the file is sealed already; only the resulting seals matter.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  (void)::fcntl(fd, F_ADD_SEALS, kSeals);
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return Status(Code::kInvalidArgument,
                  "the shared memory of a link is not a memfd, or its sender can still change "
                  "its size (seals " +
                      std::to_string(seals) + ", expected " + std::to_string(kSeals) + ")");
  }
  const auto bytes = static_cast<size_t>(info.st_size);
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, bytes, access, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return SystemError("map the shared memory of a link");
  data_ = static_cast<uint8_t*>(data);
  bytes_ = bytes;
  if (::madvise(data, bytes, MADV_DONTFORK) != 0) return SystemError("madvise(MADV_DONTFORK)");
  return Status();
}

StatusOr<std::shared_ptr<ShmWindow>> ShmWindow::Make(int fd, const Config& config) {
  auto window = std::make_shared<ShmWindow>();
  TFDIST_RETURN_IF_ERROR(window->memory_.Map(fd, /*writable=*/true));
  StatusOr<ShmPayloads> payloads = WindowPayloads(window->memory_, config);
  TFDIST_RETURN_IF_ERROR(payloads.status());
  window->pool_ = std::make_shared<SlotPool>(payloads.value());
  return window;
}

StatusOr<ShmPayloads> WindowPayloads(const SharedMemory& memory, const Config& config) {
  const auto capacity = static_cast<size_t>(config.segment_bytes);
  const size_t share = WindowBytes(config);
  if (memory.bytes() == 0 || memory.bytes() % share != 0) {
    return Status(Code::kInvalidArgument,
                  "the window of a rank has " + std::to_string(memory.bytes()) +
                      " bytes, expected a multiple of " + std::to_string(share) +
                      "; set TFDIST_SEGMENT_BYTES and TFDIST_SHM_SLOTS alike on all ranks");
  }
  return ShmPayloads(memory.data(), memory.bytes() / ShmPayloads::Bytes(1, capacity), capacity);
}

size_t WindowBytes(const Config& config) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t bytes = ShmPayloads::Bytes(static_cast<size_t>(config.shm_slots),
                                          static_cast<size_t>(config.segment_bytes));
  return (bytes + page - 1) / page * page;
}

}  // namespace tfdist
