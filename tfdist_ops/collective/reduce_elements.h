// Element types and operations of the reduction loops (reduce_block.h): how elements lie in memory,
// in which type they are added, what is done to two of them.
#ifndef TFDIST_OPS_COLLECTIVE_REDUCE_ELEMENTS_H_
#define TFDIST_OPS_COLLECTIVE_REDUCE_ELEMENTS_H_

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"

#define TFDIST_INLINE inline __attribute__((always_inline))

namespace tfdist {
namespace reduce_block {

// ---- Element types. Value: the C++ type that is computed with, as AccumulationType. Memory: a
// Value read and written in place, at any address (a buffer may follow a frame's header), in memory
// that other code accesses as bytes. kValues: how many Values make an element.

template <typename T>
struct Direct;
#define TFDIST_DIRECT(T)                                               \
  template <>                                                          \
  struct Direct<T> {                                                   \
    using Value = T;                                                   \
    typedef T Memory __attribute__((aligned(1), may_alias));           \
    static constexpr bool kDirect = true;                              \
    static constexpr bool kInLoop = false;                             \
    static constexpr int64_t kBytes = static_cast<int64_t>(sizeof(T)); \
    static constexpr int64_t kValues = 1;                              \
  }
TFDIST_DIRECT(float);
TFDIST_DIRECT(double);
TFDIST_DIRECT(int8_t);
TFDIST_DIRECT(int16_t);
TFDIST_DIRECT(int32_t);
TFDIST_DIRECT(int64_t);
TFDIST_DIRECT(uint8_t);
TFDIST_DIRECT(uint16_t);
TFDIST_DIRECT(uint32_t);
TFDIST_DIRECT(uint64_t);
#undef TFDIST_DIRECT

// Real part, imaginary part: for sums and real factors an array of twice as many real numbers.
template <typename T>
struct Complex : Direct<T> {
  static constexpr int64_t kValues = 2;
};

// Half types are widened to float32 first and rounded at the end. kInLoop: whether loops widen
// elements as they read them; a conversion by special instructions goes through a buffer instead.
template <typename Processor>
struct Float16 {
  using Value = float;
  typedef float Memory __attribute__((aligned(1), may_alias));
  static constexpr bool kDirect = false;
  static constexpr bool kInLoop = false;
  static constexpr int64_t kBytes = 2;
  static constexpr int64_t kValues = 1;
  static TFDIST_INLINE void Widen(const uint8_t* in, float* out, int64_t n) {
    Processor::Widen(in, out, n);
  }
  static TFDIST_INLINE void Round(const float* in, uint8_t* out, int64_t n) {
    Processor::Round(in, out, n);
  }
};

struct Bfloat16 {
  using Value = float;
  typedef float Memory __attribute__((aligned(1), may_alias));
  typedef uint16_t Element __attribute__((aligned(1), may_alias));
  static constexpr bool kDirect = false;
  static constexpr bool kInLoop = true;
  static constexpr int64_t kBytes = 2;
  static constexpr int64_t kValues = 1;
  static TFDIST_INLINE float ToValue(uint16_t bits) { return Bfloat16ToFloat(bits); }
  static TFDIST_INLINE void Widen(const uint8_t* in, float* out, int64_t n) {
    const Element* bits = reinterpret_cast<const Element*>(in);
    for (int64_t i = 0; i < n; ++i) out[i] = ToValue(bits[i]);
  }
  static TFDIST_INLINE void Round(const float* in, uint8_t* out, int64_t n) {
    Element* bits = reinterpret_cast<Element*>(out);
    for (int64_t i = 0; i < n; ++i) bits[i] = FloatToBfloat16(in[i]);
  }
};

// ---- Operations. `a` is the earlier operand. kPairs: needs both parts of a complex number, so
// Combine computes it without Apply. kBoolean: results are 0 or 1, even of a single contribution.

struct Arithmetic {
  static constexpr bool kPairs = false;
  static constexpr bool kBoolean = false;
};

// Unsigned numbers wrap, where signed ones would be undefined; and they must not be narrower than
// int, which they would be promoted to: 65535 * 65535 is too much for an int.
template <typename T>
using Wrapping = std::conditional_t<(sizeof(T) < sizeof(int)), unsigned, std::make_unsigned_t<T>>;

struct Sum : Arithmetic {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};
struct Product : Arithmetic {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};
// By the schoolbook formula, as NumPy: infinities may give NaN where C's `*` would repair them.
struct ComplexProduct : Arithmetic {
  static constexpr bool kPairs = true;
};
// (a != a) keeps a NaN in `a`; a NaN in `b` makes the comparison false and is chosen. `|` and not
// `||`: no branch, so that the loop becomes vector code.
struct Min : Arithmetic {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return (static_cast<int>(a <= b) | static_cast<int>(a != a)) != 0 ? a : b;
  }
};
struct Max : Arithmetic {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return (static_cast<int>(a >= b) | static_cast<int>(a != a)) != 0 ? a : b;
  }
};

struct Logical {
  static constexpr bool kPairs = false;
  static constexpr bool kBoolean = true;
};
struct And : Logical {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return static_cast<T>(static_cast<T>(a != 0) & static_cast<T>(b != 0));
  }
};
struct Or : Logical {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return static_cast<T>((a | b) != 0);
  }
};
struct Xor : Logical {
  template <typename T>
  static TFDIST_INLINE T Apply(T a, T b) {
    return static_cast<T>(static_cast<T>(a != 0) ^ static_cast<T>(b != 0));
  }
};

}  // namespace reduce_block
}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_REDUCE_ELEMENTS_H_
