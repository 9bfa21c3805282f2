#include "collective/reduce_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "collective/reduce_table.h"

namespace tfdist {
namespace {

// A copy keeps every bit, even of a NaN, and works for types that have no arithmetic. Not a copy: a
// half type that is widened or rounded, and logical operations, which give 0 or 1.
bool IsCopy(const Reduction& what, int count) {
  const bool same_type =
      (what.partials > 0) == what.to_partial || AccumulationType(what.dtype) == what.dtype;
  return count == 1 && (what.prescale == 1.0 || what.partials > 0) && what.finish.divide == 1 &&
         what.finish.multiply == 1.0 && same_type && !IsLogical(what.op);
}

[[noreturn]] void NoKernel(DType dtype, ReduceOp op) {
  // Types are checked when a collective is submitted; going on would train on wrong numbers.
  std::fprintf(stderr, "tfdist: internal error: cannot compute the %s of %s\n", ReduceOpName(op),
               DTypeName(dtype));
  std::abort();
}

}  // namespace

void Reduce(const Reduction& what, const uint8_t* const* contributions, int count, uint8_t* out,
            int64_t elements, uint8_t* also) {
  ReduceWith(LargestInstructionSet(), what, contributions, count, out, elements, also);
}

void ReduceWith(InstructionSet set, const Reduction& what, const uint8_t* const* contributions,
                int count, uint8_t* out, int64_t elements, uint8_t* also) {
  if (elements <= 0) return;
  if (IsCopy(what, count)) {
    const DType dtype = what.to_partial ? AccumulationType(what.dtype) : what.dtype;
    const size_t bytes = static_cast<size_t>(elements) * DTypeSize(dtype);
    if (contributions[0] != out) std::memcpy(out, contributions[0], bytes);
    if (also != nullptr) std::memcpy(also, out, bytes);
    return;
  }
  const reduce_block::Kernel kernel = reduce_block::FindKernel(set, what.dtype, what.op);
  if (kernel == nullptr) NoKernel(what.dtype, what.op);
  kernel({contributions, count, what.partials, what.prescale, what.finish, what.to_partial, out,
          elements, also});
}

}  // namespace tfdist
