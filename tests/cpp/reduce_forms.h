// Short forms of Reduce (collective/reduce_kernels.h).
#ifndef TFDIST_TESTS_CPP_REDUCE_FORMS_H_
#define TFDIST_TESTS_CPP_REDUCE_FORMS_H_

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "collective/reduce_kernels.h"

namespace tfdist {

// Inputs alone, to a finished result.
inline void ReduceRaw(DType dtype, ReduceOp op, const std::vector<const uint8_t*>& contributions,
                      double prescale, const Finish& finish, uint8_t* out, int64_t elements) {
  Reduce({dtype, op, prescale, finish, /*partials=*/0, /*to_partial=*/false}, contributions.data(),
         static_cast<int>(contributions.size()), out, elements);
}

// out = finish(received op own*pre): a partial result and the own input, to a finished result.
inline void ReducePartial(DType dtype, ReduceOp op, const uint8_t* received, const uint8_t* own,
                          double prescale, const Finish& finish, uint8_t* out, int64_t elements) {
  const uint8_t* contributions[] = {received, own};
  Reduce({dtype, op, prescale, finish, /*partials=*/1, /*to_partial=*/false}, contributions, 2, out,
         elements);
}

// out = in * factor, for types with factors (TakesScale); factor 1 is a copy for every type.
inline void CopyScaled(DType dtype, const uint8_t* in, double factor, uint8_t* out,
                       int64_t elements) {
  Reduce({dtype, ReduceOp::kSum, factor, {}, /*partials=*/0, /*to_partial=*/false}, &in, 1, out,
         elements);
}

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_REDUCE_FORMS_H_
