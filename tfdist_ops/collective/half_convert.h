// Conversion of whole arrays between half types and float32, with the F16C instructions where the
// processor has them. The bits are those of the scalar functions in base/dtype.h.
#ifndef TFDIST_OPS_COLLECTIVE_HALF_CONVERT_H_
#define TFDIST_OPS_COLLECTIVE_HALF_CONVERT_H_

#include <cstdint>

namespace tfdist {

// `half`: `count` float16 numbers of 2 bytes each, at any address; `single`: float32 numbers.
void HalvesToFloats(const uint8_t* half, float* single, int64_t count);
void FloatsToHalves(const float* single, uint8_t* half, int64_t count);

// The same without special instructions, for comparison in tests.
void HalvesToFloatsScalar(const uint8_t* half, float* single, int64_t count);
void FloatsToHalvesScalar(const float* single, uint8_t* half, int64_t count);

// Whether the processor has the instructions that reduce_kernels.cc is built for twice.
bool HasAvx2AndF16c();

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_HALF_CONVERT_H_
