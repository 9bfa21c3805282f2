// CRC-32C (Castagnoli): finds damage, not forgery.
//
// Reflected polynomial 0x82F63B78, initial value and final xor all ones, as in iSCSI (RFC 3720,
// section 12.1, test vectors in appendix B.4). Finds every burst of up to 32 bits and every one,
// two or three flipped bits of a frame of any size that is sent here.
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

// By the first of Crc32cMethods().
uint32_t Crc32c(ByteSpan bytes);
// Of what `crc` is of and then `bytes`; 0 is that of nothing.
uint32_t ExtendCrc32c(uint32_t crc, ByteSpan bytes);

// A way to calculate it. `extend` continues a register, without the first and last inversion.
struct Crc32cMethod {
  const char* name;
  uint32_t (*extend)(uint32_t crc, const uint8_t* data, size_t bytes);
};
// Those of this machine, the fastest first: "avx512" and "avx2" (with VPCLMULQDQ), the instruction
// for eight bytes ("sse4.2", or "arm": the CRC extension), "table" everywhere.
const std::vector<Crc32cMethod>& Crc32cMethods();

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_CRC32C_H_
