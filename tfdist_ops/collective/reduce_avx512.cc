// The reductions with AVX-512, for the types that gain from it.
#include "collective/half_convert.h"
#include "collective/reduce_table.h"

namespace tfdist {
namespace reduce_block {

#if defined(__x86_64__)

namespace {

struct Avx512Processor {
  template <typename Type, typename Op>
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void Run(const Job& job) {
    Reduce<Type, Op>(job);
  }
  static constexpr auto Widen = &HalvesToFloatsAvx512;
  static constexpr auto Round = &FloatsToHalvesAvx512;
};

}  // namespace

// Half types are widened and rounded, which keeps the processor busy. All others wait for memory:
// measured, sums of two are as fast as with AVX2 beyond the caches, and slower in the L2 cache.
//
// With AVX-512 come fused operations, and GCC 12 uses one for the product of complex numbers,
// whatever -ffp-contract says: other bits. AVX2 without FMA has none.
Kernel FindAvx512(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return FindReal<Avx512Processor, Float16<Avx512Processor>>(op);
    case DType::kBfloat16:
      return FindReal<Avx512Processor, Bfloat16>(op);
    default:
      return FindAvx2(dtype, op);
  }
}

#else

Kernel FindAvx512(DType, ReduceOp) { return nullptr; }

#endif

}  // namespace reduce_block
}  // namespace tfdist
