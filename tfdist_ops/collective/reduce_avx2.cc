// The reductions with AVX2.
#include "collective/half_convert.h"
#include "collective/reduce_table.h"

namespace tfdist {
namespace reduce_block {

#if defined(__x86_64__)

namespace {

struct Avx2Processor {
  template <typename Type, typename Op>
  __attribute__((target("avx2,f16c"))) static void Run(const Job& job) {
    Reduce<Type, Op>(job);
  }
  static constexpr auto Widen = &HalvesToFloatsAvx2;
  static constexpr auto Round = &FloatsToHalvesAvx2;
};

}  // namespace

Kernel FindAvx2(DType dtype, ReduceOp op) { return FindIn<Avx2Processor>(dtype, op); }

#else

Kernel FindAvx2(DType, ReduceOp) { return nullptr; }

#endif

}  // namespace reduce_block
}  // namespace tfdist
