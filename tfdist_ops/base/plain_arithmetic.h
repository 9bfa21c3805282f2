// PlainArithmetic: floating point as IEEE 754 has it, on this thread, while the object lives.
//
// TensorFlow's threads flush subnormal numbers to zero, other threads do not, and the engine may
// run on either: without this, the same addition could give different bits on different ranks.
#ifndef TFDIST_OPS_BASE_PLAIN_ARITHMETIC_H_
#define TFDIST_OPS_BASE_PLAIN_ARITHMETIC_H_

#include <cstdint>

namespace tfdist {

class PlainArithmetic {
 public:
  PlainArithmetic() : before_(Read()) {
    if (before_ != (before_ & ~kBits)) Write(before_ & ~kBits);
  }
  ~PlainArithmetic() {
    if (before_ != (before_ & ~kBits)) Write(before_);
  }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  // MXCSR: denormals-are-zero, both bits of the rounding mode, flush-to-zero.
  static constexpr Word kBits = 1u << 6 | 3u << 13 | 1u << 15;
  static Word Read() { return __builtin_ia32_stmxcsr(); }
  static void Write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  // FPCR: flush-to-zero for half types, rounding mode, flush-to-zero, default NaN.
  static constexpr Word kBits = Word{1} << 19 | Word{3} << 22 | Word{1} << 24 | Word{1} << 25;
  static Word Read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kBits = 0;
  static Word Read() { return 0; }
  static void Write(Word) {}
#endif

  const Word before_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_PLAIN_ARITHMETIC_H_
