// Authenticates the frames of a tcp link: sent by the right peer, unchanged, once and in order.
//
// On the wire a frame is a WireHeader of 64 bytes and the payload:
//
//   frame   FrameHeader                    32 bytes
//   digest  of the payload                 16 bytes   control lane: HMAC; data lane: CRC-32C and
//                                                     zeros, or HMAC with TFDIST_TCP_MAC=all
//   tag     HMAC of count, frame, digest   16 bytes
//
// HMAC is HMAC-SHA-256, its first 16 bytes (RFC 2104, section 5). Each direction has its own key,
// derived in the handshake from the job's secret and both nonces (tfdist/core/rendezvous/auth.py),
// so a frame of another connection, generation or direction has another tag. The count numbers
// the frames of a lane and is not sent, like the sequence number in the MAC of TLS 1.2 (RFC 5246,
// section 6.2.3.1), so that repeated, dropped or reordered frames are detected.
//
// The tag is checked before any field of the header is used, the digest before the payload is
// delivered. With TFDIST_TCP_MAC=control, an attacker who can change packets on their way can
// change the payload of a data frame such that its CRC stays the same; everything else is detected.
#ifndef TFDIST_OPS_TRANSPORT_FRAME_MAC_H_
#define TFDIST_OPS_TRANSPORT_FRAME_MAC_H_

#include <array>
#include <cstdint>

#include "transport/link.h"
#include "transport/sha256.h"

namespace tfdist {

constexpr size_t kDirectionKeyBytes = 32;
// The keys of a link: for the frames that the initiator sends, then for those that it receives.
constexpr size_t kLinkKeyBytes = 2 * kDirectionKeyBytes;
constexpr size_t kMacBytes = 16;

struct WireHeader {
  FrameHeader frame;
  std::array<uint8_t, kMacBytes> digest;
  std::array<uint8_t, kMacBytes> tag;
};
static_assert(sizeof(WireHeader) == 64, "the header is a wire format");

// One direction of a link, at one end of it.
class FrameMac {
 public:
  // `key`: kDirectionKeyBytes. `all`: payloads of the data lane get an HMAC too.
  FrameMac(ByteSpan key, bool all);

  // Fills in digest and tag of the next frame of its lane.
  void Seal(WireHeader* header, ByteSpan payload) { SealPieces(header, Pieces(&payload, 1)); }
  void SealPieces(WireHeader* header, Pieces payload);
  // Whether this is the header of the next frame of its lane. Trust no field of it otherwise.
  bool OpenHeader(const WireHeader& header);
  // Whether `payload` is that of `header`, which OpenHeader has accepted.
  bool OpenPayload(const WireHeader& header, ByteSpan payload) const;

 private:
  std::array<uint8_t, kMacBytes> Digest(const FrameHeader& frame, Pieces payload) const;
  std::array<uint8_t, kMacBytes> Tag(const WireHeader& header) const;

  HmacSha256 hmac_;
  bool all_;
  uint64_t counts_[2] = {0, 0};  // frames sealed or opened, by lane
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_FRAME_MAC_H_
