// How links are made. Rendezvous and authentication happen before (tfdist/core/rendezvous/): a
// transport gets descriptors that are already connected to the right peer.
//
// To add a transport: one file that implements Link and a factory, one line in registry.cc. The
// conformance tests (tests/cpp/link_conformance_test.cc) then run over it.
#ifndef TFDIST_OPS_TRANSPORT_TRANSPORT_H_
#define TFDIST_OPS_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/link.h"

namespace tfdist {

// The descriptors of one link. The Link owns them from MakeLink on (also when MakeLink fails) and
// closes them, apart from `own_doorbell_fd`, which all links of a rank share.
struct LinkEnds {
  int self = 0;              // rank of this end
  int peer = 0;              // rank of the other end
  int socket_fd = -1;        // connected stream socket (tcp or AF_UNIX); its EOF = the peer is gone
  int memory_fd = -1;        // shm: memfd of ShmBytes() zeroed bytes, mapped by both ends
  int own_doorbell_fd = -1;  // shm: eventfd this rank sleeps on
  int peer_doorbell_fd = -1;   // shm: eventfd the peer sleeps on; -1: it is rung by the socket
  bool initiator = false;      // exactly one end is: it sends through the first half of the memory
  std::shared_ptr<void> pipe;  // inproc: the state both ends share
  std::vector<uint8_t> key{};  // tcp: kLinkKeyBytes (frame_mac.h), the same at both ends, never
                               // used for another link
  int window_fd = -1;          // shm: the peer's window, a memfd of WindowBytes()
  std::shared_ptr<class ShmWindow> window{};  // shm: this rank's own, the same for all its links
  std::vector<int> more_sockets{};            // tcp: further sockets to the peer, in the same order
                                              // at both ends; `key` then has one key per socket
};

struct TransportEntry {
  const char* name;
  StatusOr<std::unique_ptr<Link>> (*make)(const LinkEnds& ends, const struct Config& config);
  // For tests and benchmarks: both ends of a link between ranks a and b of this process. Doorbells
  // are the eventfds of the two ranks. shm: each end has a window of its own; UseWindow changes it.
  Status (*make_pair)(int a, int b, int doorbell_a, int doorbell_b, const struct Config& config,
                      LinkEnds* end_a, LinkEnds* end_b);
};

// The table: inproc, shm, tcp.
const std::vector<TransportEntry>& Transports();
const TransportEntry* FindTransport(const std::string& name);  // null: unknown

// Bytes of the memory behind one shm link (both directions) under `config`; a multiple of the page.
size_t ShmBytes(const struct Config& config);
// Bytes of a rank's window for each of the other ranks of its host; a multiple of the page.
size_t WindowBytes(const struct Config& config);

// For tests and benchmarks: MakeWindowFile makes the memory of a window for `peers` peers.
// UseWindow lets `own` send, and `other` read, through a window in place of the one that make_pair
// has made.
StatusOr<int> MakeWindowFile(const struct Config& config, int peers);
Status UseWindow(int window_fd, const std::shared_ptr<class ShmWindow>& window, LinkEnds* own,
                 LinkEnds* other);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_TRANSPORT_H_
