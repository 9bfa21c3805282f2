#include "collective/reduce_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "collective/half_convert.h"
#include "collective/reduce_block.h"

namespace tfdist {
namespace {

using reduce_block::Job;

bool RunAnywhere(DType dtype, ReduceOp op, const Job& job) {
  return reduce_block::ReduceAny(dtype, op, job);
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) bool RunAvx2(DType dtype, ReduceOp op, const Job& job) {
  return reduce_block::ReduceAny(dtype, op, job);
}
#else
bool RunAvx2(DType dtype, ReduceOp op, const Job& job) { return RunAnywhere(dtype, op, job); }
#endif

// A copy keeps every bit, also of a NaN, and takes types that have no arithmetic.
bool IsCopy(const Job& job) {
  return job.count == 1 && job.prescale == 1.0 && job.finish.divide == 1 &&
         job.finish.multiply == 1.0;
}

void Run(DType dtype, ReduceOp op, const Job& job) {
  if (job.elements <= 0) return;
  if (IsCopy(job)) {
    const uint8_t* in = job.contributions[0];
    if (in != job.out) {
      std::memcpy(job.out, in, static_cast<size_t>(job.elements) * DTypeSize(dtype));
    }
    return;
  }
  const bool done = HasAvx2AndF16c() ? RunAvx2(dtype, op, job) : RunAnywhere(dtype, op, job);
  if (!done) {
    // Types are checked when a collective is submitted; going on would train on wrong numbers.
    std::fprintf(stderr, "tfdist: internal error: cannot compute the %s of %s\n", ReduceOpName(op),
                 DTypeName(dtype));
    std::abort();
  }
}

}  // namespace

void ReduceRaw(DType dtype, ReduceOp op, const std::vector<const uint8_t*>& contributions,
               double prescale, const Finish& finish, uint8_t* out, int64_t elements) {
  Run(dtype, op,
      {contributions.data(), static_cast<int>(contributions.size()), /*first_scaled=*/0, prescale,
       finish, out, elements});
}

void ReducePartial(DType dtype, ReduceOp op, const uint8_t* received, const uint8_t* own,
                   double prescale, const Finish& finish, uint8_t* out, int64_t elements) {
  const uint8_t* contributions[] = {received, own};
  Run(dtype, op, {contributions, 2, /*first_scaled=*/1, prescale, finish, out, elements});
}

void CopyScaled(DType dtype, const uint8_t* in, double factor, uint8_t* out, int64_t elements) {
  Run(dtype, ReduceOp::kSum, {&in, 1, /*first_scaled=*/0, factor, Finish{}, out, elements});
}

}  // namespace tfdist
