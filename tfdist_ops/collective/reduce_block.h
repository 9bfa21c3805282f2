// The loops behind reduce_kernels.cc, which compiles them twice: for any processor and for AVX2.
// Everything is inlined into the two callers, so that it takes on their instruction set. Neither
// fuses a multiplication with an addition and both add in the same order: the bits are the same.
//
// Work goes in blocks that stay in the first-level cache: every contribution is read once from
// memory and the output is written once, however many contributions there are.
#ifndef TFDIST_OPS_COLLECTIVE_REDUCE_BLOCK_H_
#define TFDIST_OPS_COLLECTIVE_REDUCE_BLOCK_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "collective/half_convert.h"
#include "collective/reduce_kernels.h"

#define TFDIST_INLINE inline __attribute__((always_inline))

namespace tfdist {
namespace reduce_block {

constexpr int64_t kBlock = 1024;  // elements

// One reduction: `count` >= 1 contributions from number `first_scaled` on are multiplied by
// `prescale` (0: all; 1: the first is a partial result).
struct Job {
  const uint8_t* const* contributions;
  int count;
  int first_scaled;
  double prescale;
  Finish finish;
  uint8_t* out;
  int64_t elements;
};

// ---- Element types. Memory: how elements are read and written in place; buffers may lie at any
// address, for instance behind a frame's header, and are seen as bytes elsewhere.

template <typename T>
struct Direct;
#define TFDIST_DIRECT(T)                                               \
  template <>                                                          \
  struct Direct<T> {                                                   \
    using Value = T;                                                   \
    typedef T Memory __attribute__((aligned(1), may_alias));           \
    static constexpr bool kDirect = true;                              \
    static constexpr int64_t kBytes = static_cast<int64_t>(sizeof(T)); \
  }
TFDIST_DIRECT(float);
TFDIST_DIRECT(double);
TFDIST_DIRECT(int32_t);
TFDIST_DIRECT(int64_t);
#undef TFDIST_DIRECT

// Half types are widened to float32 first and rounded at the end.
struct Float16 {
  using Value = float;
  typedef float Memory __attribute__((aligned(1), may_alias));
  static constexpr bool kDirect = false;
  static constexpr int64_t kBytes = 2;
  static TFDIST_INLINE void Widen(const uint8_t* in, float* out, int64_t n) {
    HalvesToFloats(in, out, n);
  }
  static TFDIST_INLINE void Round(const float* in, uint8_t* out, int64_t n) {
    FloatsToHalves(in, out, n);
  }
};

struct Bfloat16 {
  using Value = float;
  typedef float Memory __attribute__((aligned(1), may_alias));
  typedef uint16_t Bits __attribute__((aligned(1), may_alias));
  static constexpr bool kDirect = false;
  static constexpr int64_t kBytes = 2;
  static TFDIST_INLINE void Widen(const uint8_t* in, float* out, int64_t n) {
    const Bits* bits = reinterpret_cast<const Bits*>(in);
    for (int64_t i = 0; i < n; ++i) out[i] = Bfloat16ToFloat(bits[i]);
  }
  static TFDIST_INLINE void Round(const float* in, uint8_t* out, int64_t n) {
    Bits* bits = reinterpret_cast<Bits*>(out);
    for (int64_t i = 0; i < n; ++i) bits[i] = FloatToBfloat16(in[i]);
  }
};

// ---- Operations. `a` is what was there first.

struct Sum {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;  // wraps, where signed addition would be undefined
      return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      return a + b;
    }
  }
};
// (a != a) keeps a NaN in `a`; a NaN in `b` makes the comparison false and is chosen. `|` and not
// `||`: no branch, so that the loop becomes vector code.
struct Min {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return (static_cast<int>(a <= b) | static_cast<int>(a != a)) != 0 ? a : b;
  }
};
struct Max {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return (static_cast<int>(a >= b) | static_cast<int>(a != a)) != 0 ? a : b;
  }
};

// ---- Loops. `ivdep`: an output may be one of the inputs, element upon the same element, which is
// no dependence between elements; without it the in-place case would run as scalar code. They take
// the element type and not the memory type as parameter: deducing the latter would drop its
// attributes, and with them the permission to lie at any address.

template <typename Type>
TFDIST_INLINE void Copy(const typename Type::Memory* in, typename Type::Memory* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

template <typename Type>
TFDIST_INLINE void Scale(const typename Type::Memory* in, double factor, typename Type::Memory* out,
                         int64_t n) {
  const auto f = static_cast<typename Type::Value>(factor);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * f;
}

template <typename Type, typename Op>
TFDIST_INLINE void Combine(const typename Type::Memory* a, const typename Type::Memory* b,
                           typename Type::Memory* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = Op::template Apply<typename Type::Value>(a[i], b[i]);
}

template <typename Type>
TFDIST_INLINE void ApplyFinish(const Finish& finish, typename Type::Memory* data, int64_t n) {
  using Value = typename Type::Value;
  if (finish.divide != 1) {
    const Value divisor = static_cast<Value>(finish.divide);
    for (int64_t i = 0; i < n; ++i) data[i] = static_cast<Value>(data[i] / divisor);
  }
  if constexpr (std::is_floating_point_v<Value>) {
    if (finish.multiply != 1.0) Scale<Type>(data, finish.multiply, data, n);
  }
}

// Contribution `index` from element `begin` on: in place when that will do, else in `buffer`.
template <typename Type>
TFDIST_INLINE const typename Type::Memory* View(const Job& job, int index, int64_t begin, int64_t n,
                                                typename Type::Value* buffer) {
  using Memory = typename Type::Memory;
  const uint8_t* source = job.contributions[index] + begin * Type::kBytes;
  const Memory* view = buffer;
  if constexpr (Type::kDirect) {
    view = reinterpret_cast<const Memory*>(source);
  } else {
    Type::Widen(source, buffer, n);
  }
  if constexpr (std::is_floating_point_v<typename Type::Value>) {
    if (index >= job.first_scaled && job.prescale != 1.0) {
      Memory* scaled = buffer;
      Scale<Type>(view, job.prescale, scaled, n);
      view = scaled;
    }
  }
  return view;
}

template <typename Type, typename Op>
TFDIST_INLINE void Reduce(const Job& job) {
  using Value = typename Type::Value;
  using Memory = typename Type::Memory;
  alignas(64) Value sum[kBlock];
  alignas(64) Value next[kBlock];
  for (int64_t begin = 0; begin < job.elements; begin += kBlock) {
    const int64_t n = std::min(kBlock, job.elements - begin);
    uint8_t* out = job.out + begin * Type::kBytes;
    const Memory* total = View<Type>(job, 0, begin, n, sum);
    Memory* target = sum;
    for (int i = 1; i < job.count; ++i) {
      const Memory* own = View<Type>(job, i, begin, n, next);
      // The last one goes to its place at once; not earlier, for `out` may be a contribution.
      if (Type::kDirect && i == job.count - 1) target = reinterpret_cast<Memory*>(out);
      Combine<Type, Op>(total, own, target, n);
      total = target;
    }
    if (job.count == 1 && total != target) Copy<Type>(total, target, n);
    ApplyFinish<Type>(job.finish, target, n);
    if constexpr (!Type::kDirect) {
      Type::Round(sum, out, n);
    } else if (job.count == 1) {
      Copy<Type>(target, reinterpret_cast<Memory*>(out), n);
    }
  }
}

template <typename Type>
TFDIST_INLINE void ReduceType(ReduceOp op, const Job& job) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:  // the division is in job.finish
      return Reduce<Type, Sum>(job);
    case ReduceOp::kMin:
      return Reduce<Type, Min>(job);
    case ReduceOp::kMax:
      return Reduce<Type, Max>(job);
  }
}

// False for a type that cannot be reduced.
TFDIST_INLINE bool ReduceAny(DType dtype, ReduceOp op, const Job& job) {
  switch (dtype) {
    case DType::kFloat32:
      ReduceType<Direct<float>>(op, job);
      return true;
    case DType::kFloat64:
      ReduceType<Direct<double>>(op, job);
      return true;
    case DType::kFloat16:
      ReduceType<Float16>(op, job);
      return true;
    case DType::kBfloat16:
      ReduceType<Bfloat16>(op, job);
      return true;
    case DType::kInt32:
      ReduceType<Direct<int32_t>>(op, job);
      return true;
    case DType::kInt64:
      ReduceType<Direct<int64_t>>(op, job);
      return true;
    default:
      return false;
  }
}

}  // namespace reduce_block
}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_REDUCE_BLOCK_H_
