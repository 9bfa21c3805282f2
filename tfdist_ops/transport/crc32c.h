// CRC-32C (Castagnoli): detects corruption, not forgery.
//
// Reflected polynomial 0x82F63B78, initial value and final xor all ones, as in iSCSI (RFC 3720,
// section 12.1, test vectors in appendix B.4). Detects every burst of up to 32 bits and up
// to three flipped bits, in a frame of any size that is sent here.
//
// Source: G. Castagnoli, S. Brauer, M. Herrmann, "Optimization of Cyclic Redundancy-Check Codes
// with 24 and 32 Parity Bits", IEEE Trans. Communications 41 (1993).
#ifndef TFDIST_OPS_TRANSPORT_CRC32C_H_
#define TFDIST_OPS_TRANSPORT_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/span.h"

namespace tfdist {

// The CRC-32C of `bytes`, by the first of Crc32cMethods().
uint32_t Crc32c(ByteSpan bytes);
// The CRC-32C of data whose CRC-32C is `crc`, followed by `bytes`; that of no data is 0.
uint32_t ExtendCrc32c(uint32_t crc, ByteSpan bytes);

// A way to calculate a CRC-32C. `extend` continues the CRC register, without the initial and final
// inversion.
struct Crc32cMethod {
  const char* name;
  uint32_t (*extend)(uint32_t crc, const uint8_t* data, size_t bytes);
};
// This machine's methods, fastest first: "avx512" and "avx2" (with VPCLMULQDQ), the instruction
// for eight bytes ("sse4.2", or "arm": the CRC extension), "table" everywhere.
const std::vector<Crc32cMethod>& Crc32cMethods();

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_CRC32C_H_
