#include "transport/frame_mac.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "transport/crc32c.h"

namespace tfdist {
namespace {

// First byte of what is authenticated: a payload must not pass for a header.
constexpr uint8_t kPayloadDomain = 'p';
constexpr uint8_t kHeaderDomain = 'h';

ByteSpan View(const void* data, size_t bytes) { return {static_cast<const uint8_t*>(data), bytes}; }

std::array<uint8_t, kMacBytes> Shortened(const Sha256Digest& digest) {
  std::array<uint8_t, kMacBytes> out;
  std::copy_n(digest.begin(), kMacBytes, out.begin());
  return out;
}

}  // namespace

FrameMac::FrameMac(ByteSpan key, bool all) : hmac_(key), all_(all) {}

std::array<uint8_t, kMacBytes> FrameMac::Digest(const FrameHeader& frame, Pieces payload) const {
  if (!all_ && frame.lane == static_cast<uint8_t>(Lane::kData)) {
    uint32_t crc = 0;
    for (const ByteSpan& piece : payload) crc = ExtendCrc32c(crc, piece);
    std::array<uint8_t, kMacBytes> out{};
    std::memcpy(out.data(), &crc, sizeof(crc));
    return out;
  }
  // The header's tag binds this to its place, so the count need not be here.
  std::vector<ByteSpan> parts = {View(&kPayloadDomain, 1)};
  parts.insert(parts.end(), payload.begin(), payload.end());
  return Shortened(hmac_(Span<const ByteSpan>(parts.data(), parts.size())));
}

std::array<uint8_t, kMacBytes> FrameMac::Tag(const WireHeader& header) const {
  const uint64_t count = counts_[header.frame.lane];
  return Shortened(hmac_({View(&kHeaderDomain, 1), View(&count, sizeof(count)),
                          View(&header.frame, sizeof(header.frame)),
                          View(header.digest.data(), header.digest.size())}));
}

void FrameMac::SealPieces(WireHeader* header, Pieces payload) {
  header->digest = Digest(header->frame, payload);
  header->tag = Tag(*header);
  ++counts_[header->frame.lane];
}

bool FrameMac::OpenHeader(const WireHeader& header) {
  if (header.frame.lane > static_cast<uint8_t>(Lane::kData)) return false;
  const std::array<uint8_t, kMacBytes> expected = Tag(header);
  if (!EqualBytes(View(expected.data(), kMacBytes), View(header.tag.data(), kMacBytes))) {
    return false;
  }
  ++counts_[header.frame.lane];
  return true;
}

bool FrameMac::OpenPayload(const WireHeader& header, ByteSpan payload) const {
  const std::array<uint8_t, kMacBytes> expected = Digest(header.frame, Pieces(&payload, 1));
  return EqualBytes(View(expected.data(), kMacBytes), View(header.digest.data(), kMacBytes));
}

}  // namespace tfdist
