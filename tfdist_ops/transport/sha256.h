// SHA-256 (FIPS 180-4, 2015, section 6.2) and HMAC-SHA-256 (RFC 2104, 1997, section 2; RFC 6234).
//
// One function, two ways to compute it: by libcrypto, which is found when the program runs and uses
// what the processor has for it, or by the portable code here. Both give the same bits, so nothing
// has to be agreed with a peer and nothing can be negotiated down.
#ifndef TFDIST_OPS_TRANSPORT_SHA256_H_
#define TFDIST_OPS_TRANSPORT_SHA256_H_

#include <array>
#include <cstdint>

#include "base/span.h"

namespace tfdist {

constexpr size_t kSha256Bytes = 32;
using Sha256Digest = std::array<uint8_t, kSha256Bytes>;

// "libcrypto" or "portable": what this process computes it with.
const char* Sha256Method();
// For tests: everything is computed by the portable code from here on (or no longer).
void UsePortableSha256(bool portable);

// Takes bytes piece by piece. A copy continues independently.
class Sha256 {
 public:
  Sha256();
  void Add(ByteSpan bytes);
  Sha256Digest Finish();

 private:
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_;  // the first total_ % 64 bytes of it wait
  uint64_t total_ = 0;
};

// The key is processed once; then the HMAC of a message costs one block more than its hash.
class HmacSha256 {
 public:
  explicit HmacSha256(ByteSpan key);
  // The HMAC of the parts, one after the other.
  Sha256Digest operator()(std::initializer_list<ByteSpan> parts) const {
    return (*this)(Span<const ByteSpan>(parts.begin(), parts.size()));
  }
  Sha256Digest operator()(Span<const ByteSpan> parts) const;

 private:
  Sha256 inner_;
  Sha256 outer_;
};

// Whether the bytes are equal, in a time that does not depend on where they differ.
bool EqualBytes(ByteSpan a, ByteSpan b);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_SHA256_H_
