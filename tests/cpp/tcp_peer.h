// The other end of a tcp link, played by the test: it has the socket and the key.
#ifndef TFDIST_TESTS_CPP_TCP_PEER_H_
#define TFDIST_TESTS_CPP_TCP_PEER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "link_pair.h"
#include "transport/frame_mac.h"

namespace tfdist {

std::unique_ptr<Link> MakeLink(const char* transport, const LinkEnds& ends,
                               const Config& config = SmallConfig());

// The link must fail, naming `peer`, with `what` in the message, and deliver no frame before.
void CheckRefused(Link* link, int peer, const std::string& what);

// The test is rank 0; `link` is that of rank 1.
struct TcpPeer {
  explicit TcpPeer(const Config& config = SmallConfig());

  void Write(const void* data, size_t bytes);
  // The header of the next frame, whose length is that of the payload.
  WireHeader Sealed(FrameHeader header, ByteSpan payload);
  // The whole frame.
  std::string Frame(FrameHeader header, ByteSpan payload);
  ByteSpan SendKey() const { return {ends[0].key.data(), kDirectionKeyBytes}; }
  ByteSpan ReceiveKey() const {
    return {ends[0].key.data() + kDirectionKeyBytes, kDirectionKeyBytes};
  }

  std::vector<LinkEnds> ends;
  FrameMac sealer;
  std::vector<uint8_t> key;
  UniqueFd socket;
  std::unique_ptr<Link> link;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_TCP_PEER_H_
