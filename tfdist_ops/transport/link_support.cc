#include "transport/link_support.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tfdist {

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

StatusOr<UniqueFd> DuplicateFd(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) return SystemError("duplicate descriptor " + std::to_string(fd));
  return copy;
}

Status PrepareFd(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
      ::fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
    return SystemError("set the flags of descriptor " + std::to_string(fd));
  }
  return Status();
}

void RingDoorbell(int fd) {
  const uint64_t one = 1;
  // EAGAIN means that the counter is full, so the doorbell rings already.
  while (::write(fd, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

Status SystemError(const std::string& what) {
  const std::string cause = what + ": " + std::strerror(errno);
  return Status(Code::kInternal, cause, ErrorRecord{"internal", -1, "", 0, "", cause, ""});
}

Status PeerLost(int peer, const std::string& cause) {
  const std::string message = "rank " + std::to_string(peer) + " " + cause;
  return Status(Code::kAborted, message, ErrorRecord{"rank_failed", peer, "", 0, "", cause, ""});
}

Status PeerGarbage(int peer, const std::string& what) {
  return PeerLost(peer, "sent a frame that breaks the protocol: " + what);
}

Status PeerForged(int peer, const std::string& what) {
  return PeerLost(peer,
                  "is connected by a link on which bytes were changed, repeated, lost or "
                  "forged: " +
                      what);
}

std::string HeaderFault(const FrameHeader& header, Lane lane, size_t capacity) {
  if (header.lane != static_cast<uint8_t>(lane)) {
    return "lane " + std::to_string(header.lane) + ", expected " + std::to_string(Index(lane));
  }
  if (header.payload_bytes > capacity) {
    return "payload of " + std::to_string(header.payload_bytes) + " bytes, at most " +
           std::to_string(capacity) + " are allowed";
  }
  return "";
}

bool LinkBase::Open(Lane lane, size_t bytes) {
  if (!error_.ok()) return false;
  if (bytes > capacity(lane)) {
    Fail(TFDIST_INTERNAL("a frame of " + std::to_string(bytes) + " bytes for rank " +
                         std::to_string(peer_) + " is longer than its lane takes (" +
                         std::to_string(capacity(lane)) + ")"));
    return false;
  }
  open_bytes_[Index(lane)] = bytes;
  return true;
}

uint32_t LinkBase::Close(Lane lane) {
  const auto bytes = static_cast<uint32_t>(open_bytes_[Index(lane)]);
  if (lane == Lane::kData) {
    data_bytes_sent_ += bytes;
    ++data_frames_sent_;
  }
  return bytes;
}

}  // namespace tfdist
