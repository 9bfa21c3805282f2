// Helpers shared by the transports: owned descriptors, doorbells, the checks on a frame that came
// from a peer, and the errors of a link.
#ifndef TFDIST_OPS_TRANSPORT_LINK_SUPPORT_H_
#define TFDIST_OPS_TRANSPORT_LINK_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/config.h"
#include "base/status.h"
#include "transport/link.h"
#include "transport/transport.h"

namespace tfdist {

constexpr int kLanes = 2;
inline int Index(Lane lane) { return static_cast<int>(lane); }

// A descriptor that is closed with its owner.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// The descriptors of a LinkEnds, once the link owns them.
struct OwnedFds {
  explicit OwnedFds(const LinkEnds& ends)
      : socket(ends.socket_fd),
        memory(ends.memory_fd),
        window(ends.window_fd),
        peer_doorbell(ends.peer_doorbell_fd) {
    for (int fd : ends.more_sockets) more_sockets.emplace_back(fd);
  }

  UniqueFd socket;
  UniqueFd memory;
  UniqueFd window;
  UniqueFd peer_doorbell;
  std::vector<UniqueFd> more_sockets;
};

// A second descriptor of the same open file, closed on exec.
StatusOr<UniqueFd> DuplicateFd(int fd);
// Makes `fd` nonblocking and closed on exec, as every descriptor of a link must be.
Status PrepareFd(int fd);
// Makes the eventfd readable. Never blocks; a doorbell that rings already stays as it is.
void RingDoorbell(int fd);
// An error such as "socket: Too many open files", from the current errno.
Status SystemError(const std::string& what);

// A peer that is gone, and one that breaks the protocol. All are kAborted and name the rank.
Status PeerLost(int peer, const std::string& cause);
Status PeerGarbage(int peer, const std::string& what);
// Bytes that arrived over the link to `peer` but are not what it sent.
Status PeerForged(int peer, const std::string& what);

// Empty when `header` may be delivered on `lane`, else what is wrong with it. The generation is the
// engine's to check.
std::string HeaderFault(const FrameHeader& header, Lane lane, size_t capacity);

// The part of Link that is alike everywhere: names, the first error, the open sends.
class LinkBase : public Link {
 public:
  LinkBase(const LinkEnds& ends, const Config& config, const char* transport)
      : capacity_{kMaxControlPayload, static_cast<size_t>(config.segment_bytes)},
        peer_(ends.peer),
        transport_(transport) {}

  int peer() const override { return peer_; }
  const char* transport() const override { return transport_; }

 protected:
  size_t capacity(Lane lane) const { return capacity_[Index(lane)]; }
  const Status& error() const { return error_; }
  // Keeps the first error: what comes later is a consequence of it.
  void Fail(const Status& status) {
    if (error_.ok()) error_ = status;
  }
  // Notes that a send of `bytes` is open. False if the link has failed or
  // the lane takes fewer bytes.
  bool Open(Lane lane, size_t bytes);
  // Counts the open send, which goes out now. Returns its bytes.
  uint32_t Close(Lane lane);
  // The same, and fills in the fields of the header that are the transport's.
  void Close(Lane lane, FrameHeader* header) {
    header->payload_bytes = Close(lane);
    header->lane = static_cast<uint8_t>(lane);
  }

 private:
  size_t capacity_[kLanes];
  size_t open_bytes_[kLanes] = {0, 0};
  int peer_;
  const char* transport_;
  Status error_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_LINK_SUPPORT_H_
