// The identity of a reduction: what changes no result. A rank without data contributes it.
#ifndef TFDIST_OPS_COLLECTIVE_IDENTITY_ELEMENT_H_
#define TFDIST_OPS_COLLECTIVE_IDENTITY_ELEMENT_H_

#include <cstdint>

#include "base/dtype.h"

namespace tfdist {

// Fills `out` with inputs that, multiplied by `prescale`, are the identity of `op`: x op out == x
// for every x, bit for bit (a floating-point sum begins with -0: 0 would change the sign of -0).
// Two exceptions, both in products: the inverse of the prescale is rounded to the type, where it
// may also be infinite or 0, and the sign of a complex zero may change. `op` must take `dtype`
// (CheckReducible).
void FillIdentity(DType dtype, ReduceOp op, double prescale, uint8_t* out, int64_t elements);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_IDENTITY_ELEMENT_H_
