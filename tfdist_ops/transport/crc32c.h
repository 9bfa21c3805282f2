// CRC-32C (Castagnoli): finds damage, not forgery.
//
// Reflected polynomial 0x82F63B78, initial value and final xor all ones, as in iSCSI (RFC 3720,
// section 12.1, test vectors in appendix B.4). Finds every burst of up to 32 bits and every one,
// two or three flipped bits of a frame of any size that is sent here.
#ifndef TFDIST_OPS_TRANSPORT_CRC32C_H_
#define TFDIST_OPS_TRANSPORT_CRC32C_H_

#include <cstdint>

#include "base/span.h"

namespace tfdist {

// By the processor's instruction where it has one (x86: SSE4.2, Arm: the CRC extension), else by
// table.
uint32_t Crc32c(ByteSpan bytes);
// Of what `crc` is of and then `bytes`; 0 is that of nothing.
uint32_t ExtendCrc32c(uint32_t crc, ByteSpan bytes);

// The table method, for comparison.
uint32_t Crc32cByTable(ByteSpan bytes);

// "sse4.2", "arm" or "table": what Crc32c uses on this machine.
const char* Crc32cMethod();

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_CRC32C_H_
