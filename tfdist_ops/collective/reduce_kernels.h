// The arithmetic of reductions, on plain memory. Every function is a pure loop; results depend on
// the arguments alone.
//
// Two kinds of numbers go in and out. *Inputs* and finished results are of the collective's dtype.
// *Partial results* are of AccumulationType(dtype): float32 for float16 and bfloat16, else dtype
// itself. A half type is therefore rounded once, by whoever writes the finished result, over
// however many ranks the reduction goes:
//
//   a rank begins          Reduce({dtype, op, prescale, {}, /*partials=*/0, /*to_partial=*/true},
//                                 {own input}, ...), or of several inputs at once
//   a rank adds its own    Reduce({dtype, op, prescale, {}, /*partials=*/1, /*to_partial=*/true},
//                                 {received partial, own input}, ...)
//   the last one finishes  the same with its Finish and to_partial = false; `partials` may count
//                          all of the contributions, even if there is only one
//
// A partial result of n elements has n * DTypeSize(AccumulationType(dtype)) bytes.
//
// Which dtype takes which op: CheckReducible (base/reducible.h). Where nothing is computed (one
// contribution, no factor) every type is copied, bit for bit.
//
// - Integers wrap modulo 2^bits. kAverage is a sum: the caller passes Finish.divide = size; for
//   integers it is the wrapped sum, divided and truncated toward zero.
// - min and max propagate NaN, as NumPy's do. Of two NaNs, and of zeros of different sign, the
//   earlier contribution is taken.
// - Logical operations take every number but 0 for true and give 0 or 1, as NumPy's do, but in the
//   type of the inputs, and even for one contribution. An xor is true where an odd number of
//   contributions are.
// - A product of complex numbers is (ac - bd) + (ad + bc)i, without repair of infinities.
// - Buffers may lie at any address.
#ifndef TFDIST_OPS_COLLECTIVE_REDUCE_KERNELS_H_
#define TFDIST_OPS_COLLECTIVE_REDUCE_KERNELS_H_

#include <cstdint>

#include "base/dtype.h"
#include "collective/instruction_set.h"

namespace tfdist {

// Applied to the sum (or minimum, ...) at the end: first divided, then multiplied. Dividing is what
// an average does; it is exact where multiplying by 1/size is not. Integer division truncates
// toward zero. `multiply` must be 1 for integers and bool (checked before).
struct Finish {
  int64_t divide = 1;
  double multiply = 1.0;
};

struct Reduction {
  DType dtype = DType::kInvalid;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;  // multiplies inputs, not partial results; 1 for integers and bool
  Finish finish;
  int partials = 0;         // the first `partials` contributions are partial results
  bool to_partial = false;  // `out` becomes a partial result
};

// out = finish(c[0] op c[1] op ...), in that order. `count` >= 1 contributions of `elements`
// elements each. `out` may be one of the contributions: one of the same kind (input or partial
// result) as `out`, or any one where AccumulationType(dtype) == dtype. Otherwise it must not
// overlap them.
// `also`, if not null, gets the same bytes as `out`, while they are in the cache.
void Reduce(const Reduction& what, const uint8_t* const* contributions, int count, uint8_t* out,
            int64_t elements, uint8_t* also = nullptr);

// The same with given instructions, which this processor must have (ProcessorHas), in place of the
// largest set that it has: for tests and measurements.
void ReduceWith(InstructionSet set, const Reduction& what, const uint8_t* const* contributions,
                int count, uint8_t* out, int64_t elements, uint8_t* also = nullptr);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_REDUCE_KERNELS_H_
