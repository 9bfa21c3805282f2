// The loops behind reduce_kernels.h, compiled once for each instruction set (reduce_table.h).
// Everything is inlined into one function for each (type, operation, processor), compiled for that
// processor's instructions. No loop fuses a multiplication with an addition, and all add in the
// same order: the bits are the same.
//
// Work goes in blocks that stay in the first-level cache: every contribution is read once from
// memory and the output is written once, however many contributions there are.
#ifndef TFDIST_OPS_COLLECTIVE_REDUCE_BLOCK_H_
#define TFDIST_OPS_COLLECTIVE_REDUCE_BLOCK_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "collective/reduce_elements.h"
#include "collective/reduce_kernels.h"

namespace tfdist {
namespace reduce_block {

constexpr int64_t kBlock = 1024;  // values; even, for complex numbers

// One reduction: `count` >= 1 contributions, of which the first `partials` are partial results.
struct Job {
  const uint8_t* const* contributions;
  int count;
  int partials;
  double prescale;
  Finish finish;
  bool to_partial;
  uint8_t* out;
  int64_t elements;
  uint8_t* also = nullptr;  // gets what `out` gets
};
using Kernel = void (*)(const Job& job);

// ---- Loops. `ivdep`: an output may be one of the inputs, but each element is then written over
// itself, which is no dependence between elements; without the pragma the in-place case would run
// as scalar code. The loops take the element type and not the memory type as parameter: deducing
// the latter would drop its attributes, and with them the permission to lie at any address.

// The start of a reduction of one contribution.
template <typename Type, typename Op>
TFDIST_INLINE void Copy(const typename Type::Memory* in, typename Type::Memory* out, int64_t n) {
  using Value = typename Type::Value;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (Op::kBoolean) {
      out[i] = static_cast<Value>(in[i] != 0);
    } else {
      out[i] = in[i];
    }
  }
}

template <typename Type>
TFDIST_INLINE void Scale(const typename Type::Memory* in, double factor, typename Type::Memory* out,
                         int64_t n) {
  const auto f = static_cast<typename Type::Value>(factor);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * f;
}

// How Combine reads an operand: as values, or as elements that it widens.
template <typename Type>
struct Values {
  using Pointer = const typename Type::Memory*;
  static TFDIST_INLINE typename Type::Value At(Pointer in, int64_t i) { return in[i]; }
};
template <typename Type>
struct Elements {
  using Pointer = const typename Type::Element*;
  static TFDIST_INLINE typename Type::Value At(Pointer in, int64_t i) {
    return Type::ToValue(in[i]);
  }
};

template <typename Type, typename Op, typename A, typename B>
TFDIST_INLINE void Combine(typename A::Pointer a, typename B::Pointer b, typename Type::Memory* out,
                           int64_t n) {
  using Value = typename Type::Value;
  if constexpr (Op::kPairs) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i += 2) {
      const Value re = a[i] * b[i] - a[i + 1] * b[i + 1];
      const Value im = a[i] * b[i + 1] + a[i + 1] * b[i];
      out[i] = re;
      out[i + 1] = im;
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = Op::template Apply<Value>(A::At(a, i), B::At(b, i));
  }
}

// data / divide, for divide >= 2; of integers cut toward zero.
//
// Processors have no vector division of integers, so this divides in floating point. Where a / d is
// below an integer q, it is so by at least 1 / d, relatively by at least 1 / a: float32 (24 bits)
// with 16-bit integers and float64 (53 bits) with 32-bit ones never round up to q. A divisor that
// does not fit into the type is larger than every number of it and gives 0, as it must. Since
// divide >= 2, the quotient of a uint32 fits into an int32.
template <typename Type>
TFDIST_INLINE void Divide(int64_t divide, typename Type::Memory* data, int64_t n) {
  using Value = typename Type::Value;
  if constexpr (std::is_integral_v<Value> && sizeof(Value) <= 4) {
    using Real = std::conditional_t<sizeof(Value) <= 2, float, double>;
    const Real divisor = static_cast<Real>(divide);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const Real quotient = static_cast<Real>(data[i]) / divisor;
      data[i] = static_cast<Value>(static_cast<int32_t>(quotient));
    }
  } else {
    const Value divisor = static_cast<Value>(divide);
    for (int64_t i = 0; i < n; ++i) data[i] = data[i] / divisor;
  }
}

template <typename Type>
TFDIST_INLINE void ApplyFinish(const Finish& finish, typename Type::Memory* data, int64_t n) {
  if constexpr (std::is_floating_point_v<typename Type::Value>) {
    // Both round the same number once, and a product takes a fraction of a quotient's time.
    const bool has_inverse = (finish.divide & (finish.divide - 1)) == 0;  // a power of two
    if (finish.divide != 1 && has_inverse) {
      Scale<Type>(data, 1.0 / static_cast<double>(finish.divide), data, n);
    } else if (finish.divide != 1) {
      Divide<Type>(finish.divide, data, n);
    }
    if (finish.multiply != 1.0) Scale<Type>(data, finish.multiply, data, n);
  } else if (finish.divide != 1) {
    Divide<Type>(finish.divide, data, n);
  }
}

// Whether Combine can take contribution `index` as it lies in memory.
template <typename Type>
TFDIST_INLINE bool ReadInLoop(const Job& job, int index) {
  return Type::kInLoop && job.count > 1 && index >= job.partials && job.prescale == 1.0;
}

// Contribution `index` from value `begin` on: in place when that will do, else in `buffer`.
template <typename Type>
TFDIST_INLINE const typename Type::Memory* View(const Job& job, int index, int64_t begin, int64_t n,
                                                typename Type::Value* buffer) {
  using Memory = typename Type::Memory;
  const uint8_t* source = job.contributions[index];
  if (index < job.partials) return reinterpret_cast<const Memory*>(source) + begin;
  const Memory* view = buffer;
  if constexpr (Type::kDirect) {
    view = reinterpret_cast<const Memory*>(source) + begin;
  } else {
    Type::Widen(source + begin * Type::kBytes, buffer, n);
  }
  if constexpr (std::is_floating_point_v<typename Type::Value>) {
    if (job.prescale != 1.0) {
      Memory* scaled = buffer;
      Scale<Type>(view, job.prescale, scaled, n);
      view = scaled;
    }
  }
  return view;
}

// target = total op contribution `index`; for index 1 `total` is null where the loop itself reads
// contribution 0.
template <typename Type, typename Op>
TFDIST_INLINE void CombineNext(const Job& job, int index, int64_t begin, int64_t n,
                               const typename Type::Memory* total, typename Type::Value* buffer,
                               typename Type::Memory* target) {
  if constexpr (Type::kInLoop) {
    if (ReadInLoop<Type>(job, index)) {
      using Pointer = typename Elements<Type>::Pointer;
      const int64_t offset = begin * Type::kBytes;
      const auto own = reinterpret_cast<Pointer>(job.contributions[index] + offset);
      if (index == 1 && ReadInLoop<Type>(job, 0)) {
        const auto first = reinterpret_cast<Pointer>(job.contributions[0] + offset);
        Combine<Type, Op, Elements<Type>, Elements<Type>>(first, own, target, n);
      } else {
        Combine<Type, Op, Values<Type>, Elements<Type>>(total, own, target, n);
      }
      return;
    }
  }
  const typename Type::Memory* own = View<Type>(job, index, begin, n, buffer);
  Combine<Type, Op, Values<Type>, Values<Type>>(total, own, target, n);
}

template <typename Type, typename Op>
TFDIST_INLINE void Reduce(const Job& job) {
  using Value = typename Type::Value;
  using Memory = typename Type::Memory;
  alignas(64) Value sum[kBlock];
  alignas(64) Value next[kBlock];
  const bool round = !Type::kDirect && !job.to_partial;
  const int64_t values = job.elements * Type::kValues;
  for (int64_t begin = 0; begin < values; begin += kBlock) {
    const int64_t n = std::min(kBlock, values - begin);
    Memory* result = round ? sum : reinterpret_cast<Memory*>(job.out) + begin;
    const Memory* total = ReadInLoop<Type>(job, 0) ? nullptr : View<Type>(job, 0, begin, n, sum);
    for (int i = 1; i < job.count; ++i) {
      // The last one goes to its place at once; not earlier, for `out` may be a contribution.
      Memory* target = i == job.count - 1 ? result : sum;
      CombineNext<Type, Op>(job, i, begin, n, total, next, target);
      total = target;
    }
    if (job.count == 1 && (Op::kBoolean || total != result)) Copy<Type, Op>(total, result, n);
    ApplyFinish<Type>(job.finish, result, n);
    if constexpr (!Type::kDirect) {
      if (round) Type::Round(sum, job.out + begin * Type::kBytes, n);
    }
    if (job.also != nullptr) {
      const int64_t bytes = round ? Type::kBytes : static_cast<int64_t>(sizeof(Value));
      std::memcpy(job.also + begin * bytes, job.out + begin * bytes,
                  static_cast<size_t>(n * bytes));
    }
  }
}

}  // namespace reduce_block
}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_REDUCE_BLOCK_H_
