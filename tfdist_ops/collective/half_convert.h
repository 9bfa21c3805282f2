// Conversion of whole arrays between float16 and float32, once for each instruction set. The bits
// are those of the scalar functions in base/dtype.h.
#ifndef TFDIST_OPS_COLLECTIVE_HALF_CONVERT_H_
#define TFDIST_OPS_COLLECTIVE_HALF_CONVERT_H_

#include <cstdint>

namespace tfdist {

// `half`: `count` float16 numbers of 2 bytes each, at any address; `single`: float32 numbers.
void HalvesToFloats(const uint8_t* half, float* single, int64_t count);
void FloatsToHalves(const float* single, uint8_t* half, int64_t count);

#if defined(__x86_64__)
// For processors that have the instructions (instruction_set.h).
void HalvesToFloatsAvx2(const uint8_t* half, float* single, int64_t count);
void FloatsToHalvesAvx2(const float* single, uint8_t* half, int64_t count);
void HalvesToFloatsAvx512(const uint8_t* half, float* single, int64_t count);
void FloatsToHalvesAvx512(const float* single, uint8_t* half, int64_t count);
#endif

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_HALF_CONVERT_H_
