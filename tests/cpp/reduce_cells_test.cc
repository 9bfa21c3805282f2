// Every (type, operation) cell of the reductions against a reference that knows nothing of the
// kernels: whole numbers, extremes of integers included, whose results are exact, so that bits can
// be compared. Each cell runs fresh and in place, at odd addresses, with every instruction
// set, in one go and by way of partial results.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/reducible.h"
#include "check.h"
#include "reduce_forms.h"

namespace tfdist {
namespace {

using Bytes = std::vector<uint8_t>;
const size_t kLengths[] = {1, 2, 7, 33, 1023, 1024, 1025, 2051};

std::string Name(DType dtype, ReduceOp op) {
  return std::string(DTypeName(dtype)) + " " + ReduceOpName(op);
}

Finish FinishOf(ReduceOp op, size_t count) {
  return {op == ReduceOp::kAverage ? static_cast<int64_t>(count) : 1, 1.0};
}

// ---- One cell, in every way that the core runs it.

void ExpectFreshAtOddAddresses(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                               const Bytes& expected, int64_t elements) {
  std::vector<Bytes> shifted;
  std::vector<const uint8_t*> pointers;
  for (size_t i = 0; i < inputs.size(); ++i) {
    shifted.emplace_back(2 * i + 1, 0xee);
    shifted[i].insert(shifted[i].end(), inputs[i].begin(), inputs[i].end());
  }
  for (size_t i = 0; i < inputs.size(); ++i) pointers.push_back(shifted[i].data() + 2 * i + 1);
  Bytes out(expected.size() + 16, 0xee);
  ReduceRaw(dtype, op, pointers, 1.0, FinishOf(op, inputs.size()), out.data() + 3, elements);
  Bytes framed(3, 0xee);
  framed.insert(framed.end(), expected.begin(), expected.end());
  framed.resize(out.size(), 0xee);
  CHECK_EQ_IN(out == framed, true, Name(dtype, op) + ", fresh");
}

void ExpectInPlace(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                   const Bytes& expected, int64_t elements) {
  for (size_t target = 0; target < inputs.size(); ++target) {
    std::vector<Bytes> own = inputs;
    std::vector<const uint8_t*> pointers;
    for (const Bytes& b : own) pointers.push_back(b.data());
    ReduceRaw(dtype, op, pointers, 1.0, FinishOf(op, inputs.size()), own[target].data(), elements);
    for (size_t i = 0; i < inputs.size(); ++i) {
      CHECK_EQ_IN(own[i] == (i == target ? expected : inputs[i]), true,
                  Name(dtype, op) + ", in place of contribution " + std::to_string(target));
    }
  }
}

void ExpectWithEveryInstructionSet(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                                   const Bytes& expected, int64_t elements) {
  std::vector<const uint8_t*> pointers;
  for (const Bytes& b : inputs) pointers.push_back(b.data());
  const int count = static_cast<int>(inputs.size());
  const Reduction what{dtype, op, 1.0, FinishOf(op, inputs.size()), 0, false};
  for (InstructionSet set : kInstructionSets) {
    if (!ProcessorHas(set)) continue;
    Bytes out(expected.size());
    ReduceWith(set, what, pointers.data(), count, out.data(), elements);
    CHECK_EQ_IN(out == expected, true, Name(dtype, op) + ", " + InstructionSetName(set));
  }
}

// As over a ring: one rank after the other adds its input to what came.
void ExpectByPartialResults(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                            const Bytes& expected, int64_t elements) {
  Bytes partial(static_cast<size_t>(elements) * DTypeSize(AccumulationType(dtype)));
  Bytes out(expected.size());
  const uint8_t* first[] = {inputs[0].data()};
  Reduce({dtype, op, 1.0, {}, 0, true}, first, 1, partial.data(), elements);
  for (size_t i = 1; i < inputs.size(); ++i) {
    const uint8_t* both[] = {partial.data(), inputs[i].data()};
    Reduce({dtype, op, 1.0, {}, 1, true}, both, 2, partial.data(), elements);
  }
  const uint8_t* last[] = {partial.data()};
  Reduce({dtype, op, 1.0, FinishOf(op, inputs.size()), 1, false}, last, 1, out.data(), elements);
  CHECK_EQ_IN(out == expected, true, Name(dtype, op) + ", by partial results");
}

// `draw` gives an element of a rank, `reference` the finished element of the ranks' elements.
template <typename T>
void ExpectType(DType dtype, const std::function<T(std::mt19937_64&)>& draw,
                const std::function<T(ReduceOp, const std::vector<T>&)>& reference) {
  std::mt19937_64 random(static_cast<uint64_t>(dtype));
  int cells = 0;
  for (int number = 0; number <= static_cast<int>(kLastElementwiseOp); ++number) {
    const ReduceOp op = static_cast<ReduceOp>(number);
    if (!CheckReducible(dtype, op).ok()) continue;
    ++cells;
    for (size_t length : kLengths) {
      for (size_t count : {1u, 2u, 3u, 5u}) {
        std::vector<std::vector<T>> values(count, std::vector<T>(length));
        std::vector<T> wanted(length);
        for (size_t i = 0; i < length; ++i) {
          std::vector<T> ranks;
          for (auto& own : values) ranks.push_back(own[i] = draw(random));
          wanted[i] = reference(op, ranks);
        }
        std::vector<Bytes> inputs;
        const size_t bytes = length * sizeof(T);
        CHECK_EQ(sizeof(T), DTypeSize(dtype));
        const auto raw = [&](const std::vector<T>& v) {
          const uint8_t* begin = reinterpret_cast<const uint8_t*>(v.data());
          return Bytes(begin, begin + bytes);
        };
        for (const auto& own : values) inputs.push_back(raw(own));
        const Bytes expected = raw(wanted);
        const int64_t n = static_cast<int64_t>(length);
        ExpectFreshAtOddAddresses(dtype, op, inputs, expected, n);
        ExpectInPlace(dtype, op, inputs, expected, n);
        ExpectWithEveryInstructionSet(dtype, op, inputs, expected, n);
        ExpectByPartialResults(dtype, op, inputs, expected, n);
      }
    }
  }
  CHECK(cells >= 3);
}

// ---- References.

bool LogicalOf(ReduceOp op, const std::vector<bool>& truths) {
  const auto trues = std::count(truths.begin(), truths.end(), true);
  if (op == ReduceOp::kLogicalAnd) return trues == static_cast<std::ptrdiff_t>(truths.size());
  if (op == ReduceOp::kLogicalOr) return trues > 0;
  return trues % 2 == 1;
}

// Modulo 2^128, of which the low bits are the wrapped number.
using Wide = unsigned __int128;
template <typename T>
T Wrapped(Wide value) {
  return static_cast<T>(static_cast<std::make_unsigned_t<T>>(value));
}

template <typename T>
T IntegerReference(ReduceOp op, const std::vector<T>& values) {
  if (IsLogical(op)) {
    std::vector<bool> truths;
    for (T v : values) truths.push_back(v != 0);
    return static_cast<T>(LogicalOf(op, truths));
  }
  if (op == ReduceOp::kMin) return *std::min_element(values.begin(), values.end());
  if (op == ReduceOp::kMax) return *std::max_element(values.begin(), values.end());
  Wide total = op == ReduceOp::kProduct ? 1 : 0;
  for (T v : values) {
    const Wide value = static_cast<Wide>(static_cast<__int128>(v));
    total = op == ReduceOp::kProduct ? total * value : total + value;
  }
  const T wrapped = Wrapped<T>(total);
  if (op != ReduceOp::kAverage) return wrapped;
  return static_cast<T>(static_cast<__int128>(wrapped) / static_cast<__int128>(values.size()));
}

template <typename T>
void ExpectInteger(DType dtype) {
  using Limits = std::numeric_limits<T>;
  const auto draw = [](std::mt19937_64& random) -> T {
    const T extremes[] = {Limits::min(),
                          static_cast<T>(Limits::min() + 1),
                          static_cast<T>(-1),
                          0,
                          0,
                          1,
                          2,
                          static_cast<T>(Limits::max() - 1),
                          Limits::max()};
    const uint64_t bits = random();
    return bits % 2 == 0 ? extremes[(bits >> 8) % 9] : static_cast<T>(bits >> 4);
  };
  ExpectType<T>(dtype, draw, IntegerReference<T>);
}

double RealReference(ReduceOp op, const std::vector<double>& values) {
  if (op == ReduceOp::kMin) return *std::min_element(values.begin(), values.end());
  if (op == ReduceOp::kMax) return *std::max_element(values.begin(), values.end());
  double exact = values[0];
  for (size_t i = 1; i < values.size(); ++i) {
    exact = op == ReduceOp::kProduct ? exact * values[i] : exact + values[i];
  }
  return exact;
}

// Whole numbers from -9 to 9: five of them have an exact product in float32.
int Small(std::mt19937_64& random) { return static_cast<int>(random() % 19) - 9; }

// Divides in A, the type that adds; `round` to the element type once.
template <typename T, typename A>
void ExpectReal(DType dtype, T (*round)(A), A (*widen)(T)) {
  ExpectType<T>(
      dtype, [=](std::mt19937_64& random) { return round(static_cast<A>(Small(random))); },
      [=](ReduceOp op, const std::vector<T>& values) {
        std::vector<double> wide;
        for (T v : values) wide.push_back(static_cast<double>(widen(v)));
        const A exact = static_cast<A>(RealReference(op, wide));
        return round(op == ReduceOp::kAverage ? exact / static_cast<A>(values.size()) : exact);
      });
}

template <typename T>
void ExpectComplex(DType dtype) {
  using C = std::complex<T>;
  ExpectType<C>(
      dtype,
      [](std::mt19937_64& random) {
        const T re = static_cast<T>(Small(random));
        return C(re, static_cast<T>(Small(random)));
      },
      [](ReduceOp op, const std::vector<C>& values) {
        std::complex<double> exact(values[0]);
        for (size_t i = 1; i < values.size(); ++i) {
          const std::complex<double> v(values[i]);
          exact = op == ReduceOp::kProduct ? exact * v : exact + v;
        }
        const C total(static_cast<T>(exact.real()), static_cast<T>(exact.imag()));
        const T n = op == ReduceOp::kAverage ? static_cast<T>(values.size()) : T{1};
        return C(total.real() / n, total.imag() / n);
      });
}

template <typename T>
T Same(T value) {
  return value;
}

TEST(signed_integers) {
  ExpectInteger<int8_t>(DType::kInt8);
  ExpectInteger<int16_t>(DType::kInt16);
  ExpectInteger<int32_t>(DType::kInt32);
  ExpectInteger<int64_t>(DType::kInt64);
}

TEST(unsigned_integers) {
  ExpectInteger<uint8_t>(DType::kUint8);
  ExpectInteger<uint16_t>(DType::kUint16);
  ExpectInteger<uint32_t>(DType::kUint32);
  ExpectInteger<uint64_t>(DType::kUint64);
}

TEST(bool_has_two_values) {
  ExpectType<uint8_t>(
      DType::kBool, [](std::mt19937_64& random) { return static_cast<uint8_t>(random() % 4 != 0); },
      [](ReduceOp op, const std::vector<uint8_t>& values) -> uint8_t {
        if (op == ReduceOp::kMin) return *std::min_element(values.begin(), values.end());
        if (op == ReduceOp::kMax) return *std::max_element(values.begin(), values.end());
        std::vector<bool> truths(values.begin(), values.end());
        return static_cast<uint8_t>(LogicalOf(op, truths));
      });
}

TEST(floating_types) {
  ExpectReal<float, float>(DType::kFloat32, Same<float>, Same<float>);
  ExpectReal<double, double>(DType::kFloat64, Same<double>, Same<double>);
  ExpectReal<uint16_t, float>(DType::kFloat16, FloatToHalf, HalfToFloat);
  ExpectReal<uint16_t, float>(DType::kBfloat16, FloatToBfloat16, Bfloat16ToFloat);
}

TEST(complex_types) {
  ExpectComplex<float>(DType::kComplex64);
  ExpectComplex<double>(DType::kComplex128);
}

// ---- The rest of the table, and what the cells above leave open.

template <typename T>
T Two(DType dtype, ReduceOp op, T a, T b, Finish finish = {}, double prescale = 1.0) {
  T out{};
  ReduceRaw(dtype, op, {reinterpret_cast<uint8_t*>(&a), reinterpret_cast<uint8_t*>(&b)}, prescale,
            finish, reinterpret_cast<uint8_t*>(&out), 1);
  return out;
}

TEST(of_zeros_the_earlier_one_is_the_minimum_and_the_maximum) {
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    CHECK(std::signbit(Two<float>(DType::kFloat32, op, -0.0f, 0.0f)));
    CHECK(!std::signbit(Two<float>(DType::kFloat32, op, 0.0f, -0.0f)));
    CHECK_EQ(Two<uint16_t>(DType::kFloat16, op, 0x8000, 0x0000), 0x8000);
    CHECK_EQ(Two<uint16_t>(DType::kBfloat16, op, 0x0000, 0x8000), 0x0000);
  }
  CHECK(!std::signbit(Two<double>(DType::kFloat64, ReduceOp::kSum, -0.0, 0.0)));
  CHECK(std::signbit(Two<double>(DType::kFloat64, ReduceOp::kSum, -0.0, -0.0)));
}

TEST(an_average_divides_by_more_ranks_than_a_small_integer_can_count) {
  CHECK_EQ(Two<int8_t>(DType::kInt8, ReduceOp::kAverage, 100, 20, {300, 1.0}), 0);
  CHECK_EQ(Two<int8_t>(DType::kInt8, ReduceOp::kAverage, -100, -28, {128, 1.0}), -1);
  CHECK_EQ(Two<uint8_t>(DType::kUint8, ReduceOp::kAverage, 200, 55, {256, 1.0}), 0);
  CHECK_EQ(Two<uint16_t>(DType::kUint16, ReduceOp::kAverage, 60000, 5535, {65536, 1.0}), 0);
}

// A power of two has an inverse, which is taken in its place: subnormals, limits and NaNs too.
template <typename T, typename Bits>
void ExpectRealQuotients(DType dtype) {
  std::mt19937_64 random(43);
  std::vector<T> values(4000);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = static_cast<Bits>(static_cast<Bits>(random()) >> (i % 16 == 0 ? 12 : 0));
    std::memcpy(&values[i], &bits, sizeof(T));
  }
  const uint8_t* in = reinterpret_cast<const uint8_t*>(values.data());
  for (int64_t divisor : {2, 3, 4, 6, 8, 64, 16777217, 1 << 30}) {
    std::vector<T> out(values.size());
    ReduceRaw(dtype, ReduceOp::kAverage, {in}, 1.0, {divisor, 1.0},
              reinterpret_cast<uint8_t*>(out.data()), static_cast<int64_t>(out.size()));
    for (size_t i = 0; i < out.size(); ++i) {
      const T quotient = values[i] / static_cast<T>(divisor);
      CHECK_EQ_IN(std::memcmp(&out[i], &quotient, sizeof(T)), 0,
                  std::to_string(values[i]) + " / " + std::to_string(divisor));
    }
  }
}

TEST(an_average_of_reals_is_the_quotient_to_the_bit) {
  ExpectRealQuotients<float, uint32_t>(DType::kFloat32);
  ExpectRealQuotients<double, uint64_t>(DType::kFloat64);
}

// Integer division runs in floating point.
template <typename T>
void ExpectQuotients(DType dtype, const std::vector<T>& values) {
  const Bytes zeros(values.size() * sizeof(T));
  const uint8_t* in = reinterpret_cast<const uint8_t*>(values.data());
  for (int64_t divisor : {2, 3, 5, 7, 10, 127, 128, 255, 257, 1000, 65535, 65537, 16777217}) {
    std::vector<T> out(values.size());
    ReduceRaw(dtype, ReduceOp::kAverage, {in, zeros.data()}, 1.0, {divisor, 1.0},
              reinterpret_cast<uint8_t*>(out.data()), static_cast<int64_t>(out.size()));
    for (size_t i = 0; i < out.size(); ++i) {
      CHECK_EQ_IN(static_cast<int64_t>(out[i]), static_cast<int64_t>(values[i]) / divisor,
                  std::to_string(values[i]) + " / " + std::to_string(divisor));
    }
  }
}

TEST(an_average_of_integers_is_cut_toward_zero_exactly) {
  std::vector<int16_t> int16;
  std::vector<uint16_t> uint16;
  for (int v = 0; v < 65536; ++v) {
    int16.push_back(static_cast<int16_t>(v - 32768));
    uint16.push_back(static_cast<uint16_t>(v));
  }
  ExpectQuotients(DType::kInt16, int16);
  ExpectQuotients(DType::kUint16, uint16);
  // Multiples of the divisors and their neighbours, up to the ends of the range.
  std::vector<int32_t> int32;
  std::vector<uint32_t> uint32;
  std::mt19937 random(29);
  for (uint32_t factor : {2u, 3u, 5u, 7u, 10u, 127u, 255u, 1000u, 65535u, 65537u, 16777217u}) {
    for (int i = 0; i < 2000; ++i) {
      const uint32_t multiple = static_cast<uint32_t>(random()) / factor * factor;
      for (uint32_t v : {multiple - 1, multiple, multiple + 1}) {
        uint32.push_back(v);
        int32.push_back(static_cast<int32_t>(v));
      }
    }
  }
  for (int32_t v :
       {std::numeric_limits<int32_t>::min(), -1, 0, 1, std::numeric_limits<int32_t>::max()}) {
    int32.push_back(v);
    uint32.push_back(static_cast<uint32_t>(v));
  }
  ExpectQuotients(DType::kInt32, int32);
  ExpectQuotients(DType::kUint32, uint32);
}

TEST(factors_of_complex_numbers_multiply_both_parts) {
  using C = std::complex<float>;
  CHECK_EQ(Two<C>(DType::kComplex64, ReduceOp::kSum, C(1, 2), C(3, -4), {2, 3.0}, 0.5),
           C(3.0f, -1.5f));
  CHECK_EQ(Two<C>(DType::kComplex64, ReduceOp::kProduct, C(2, 4), C(6, -8), {1, 2.0}, 0.5),
           C(22.0f, 4.0f));  // (1+2i)(3-4i) = 11+2i
}

TEST(a_complex_product_keeps_a_nan) {
  using C = std::complex<double>;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const C product = Two<C>(DType::kComplex128, ReduceOp::kProduct, C(nan, 0), C(1, 1));
  CHECK(std::isnan(product.real()) && std::isnan(product.imag()));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
