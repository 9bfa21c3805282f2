// The arithmetic of reductions, on plain memory. Every function is a pure loop; results depend on
// the arguments alone.
//
// Half types (float16, bfloat16) are accumulated in float32 and rounded once, at the end. Integers
// wrap. min and max propagate NaN, as NumPy's do. kAverage is a sum: the caller passes
// Finish.divide = size. Buffers may lie at any address. Types must satisfy IsReducible, except
// where nothing is computed (one contribution, no factor): then every type is copied, bit for bit.
#ifndef TFDIST_OPS_COLLECTIVE_REDUCE_KERNELS_H_
#define TFDIST_OPS_COLLECTIVE_REDUCE_KERNELS_H_

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/span.h"

namespace tfdist {

// What is done to the sum (or minimum, ...) at the end: first divided, then multiplied. Dividing is
// what an average does; it is exact where multiplying by 1/size is not. Integer division truncates
// toward zero. `multiply` must be 1 for integers (checked before).
struct Finish {
  int64_t divide = 1;
  double multiply = 1.0;
};

// out = finish(c[0]*pre op c[1]*pre op ... in that order). `contributions` point at `elements`
// elements each; one of them may be `out` itself. `prescale` multiplies every contribution.
//
// `prescale` and `factor` must be 1 for integers (checked before).
void ReduceRaw(DType dtype, ReduceOp op, const std::vector<const uint8_t*>& contributions,
               double prescale, const Finish& finish, uint8_t* out, int64_t elements);

// out = finish(received op own*pre). `own` may be `out`.
void ReducePartial(DType dtype, ReduceOp op, const uint8_t* received, const uint8_t* own,
                   double prescale, const Finish& finish, uint8_t* out, int64_t elements);

// out = in * factor, for reducible types; factor 1 is a copy for every type.
void CopyScaled(DType dtype, const uint8_t* in, double factor, uint8_t* out, int64_t elements);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_REDUCE_KERNELS_H_
