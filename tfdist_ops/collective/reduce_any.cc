// The reductions, compiled for every processor of the architecture.
#include "collective/half_convert.h"
#include "collective/reduce_table.h"

namespace tfdist {
namespace reduce_block {
namespace {

struct AnyProcessor {
  template <typename Type, typename Op>
  static void Run(const Job& job) {
    Reduce<Type, Op>(job);
  }
  static constexpr auto Widen = &HalvesToFloats;
  static constexpr auto Round = &FloatsToHalves;
};

}  // namespace

Kernel FindAny(DType dtype, ReduceOp op) { return FindIn<AnyProcessor>(dtype, op); }

}  // namespace reduce_block
}  // namespace tfdist
