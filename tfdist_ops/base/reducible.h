// Which element type takes which reduction.
//
//   dtype                                   operations
//   int8..int64, uint8..uint64              all but adasum
//   bool                                    min, max (NumPy's: and, or), logical
//   float16, bfloat16, float32, float64     sum, average, min, max, product, adasum
//   complex64, complex128                   sum, average, product
//   float8_e5m2, float8_e4m3fn              none: they can only be moved
#ifndef TFDIST_OPS_BASE_REDUCIBLE_H_
#define TFDIST_OPS_BASE_REDUCIBLE_H_

#include "base/dtype.h"
#include "base/status.h"

namespace tfdist {

// OK, or INVALID_ARGUMENT: what was expected, what came, what to do. Python shows the same words.
Status CheckReducible(DType dtype, ReduceOp op);

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_REDUCIBLE_H_
