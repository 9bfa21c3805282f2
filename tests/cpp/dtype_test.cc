// Element types: sizes, names, which takes which reduction, and the conversions between half types
// and float32.
#include "base/dtype.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/reducible.h"
#include "check.h"
#include "collective/half_convert.h"
#include "collective/instruction_set.h"

namespace tfdist {
namespace {

uint32_t Bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
float FromBits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Independent of the code under test: the value by the definition of the format.
double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// Nearest even by the definition: the grid step at |x|, then rint in double (exact for float32).
double NearestHalf(float x) {
  int exponent = 0;
  std::frexp(static_cast<double>(x), &exponent);  // |x| in [2^(e-1), 2^e)
  const double step = std::ldexp(1.0, std::max(exponent - 11, -24));
  const double rounded = std::nearbyint(static_cast<double>(x) / step) * step;
  return std::fabs(rounded) >= 65536.0 ? std::copysign(INFINITY, x) : rounded;
}

std::vector<float> InterestingFloats() {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000u; ++high) {  // every sign, exponent, 7 bits of mantissa
    for (uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(FromBits((high << 16) | low));
    }
  }
  for (uint32_t half = 0; half < 0x7c00u; ++half) {  // every tie between two halves, +- 1 ulp
    const double middle =
        (HalfValue(static_cast<uint16_t>(half)) +
         (half == 0x7bffu ? 65536.0 : HalfValue(static_cast<uint16_t>(half + 1)))) /
        2;
    const float tie = static_cast<float>(middle);
    for (float v : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, INFINITY)}) {
      values.push_back(v);
      values.push_back(-v);
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) values.push_back(FromBits(static_cast<uint32_t>(random())));
  return values;
}

TEST(sizes_and_names_are_tensorflows) {
  CHECK_EQ(DTypeSize(DType::kFloat32), 4u);
  CHECK_EQ(DTypeSize(DType::kFloat64), 8u);
  CHECK_EQ(DTypeSize(DType::kBfloat16), 2u);
  CHECK_EQ(DTypeSize(DType::kFloat16), 2u);
  CHECK_EQ(DTypeSize(DType::kBool), 1u);
  CHECK_EQ(DTypeSize(DType::kComplex128), 16u);
  CHECK_EQ(DTypeSize(DType::kInvalid), 0u);
  CHECK_EQ(DTypeSize(static_cast<DType>(7)), 0u);  // string
  CHECK_EQ(std::string(DTypeName(DType::kFloat16)), "float16");
  CHECK_EQ(std::string(DTypeName(DType::kBfloat16)), "bfloat16");
  CHECK_EQ(std::string(DTypeName(DType::kUint64)), "uint64");
  CHECK_EQ(std::string(DTypeName(static_cast<DType>(7))), "invalid");
  CHECK_EQ(std::string(ReduceOpName(ReduceOp::kAverage)), "average");
  CHECK_EQ(std::string(ReduceOpName(ReduceOp::kMin)), "min");
  CHECK_EQ(std::string(ReduceOpName(ReduceOp::kLogicalXor)), "logical_xor");
  CHECK_EQ(std::string(ReduceOpName(ReduceOp::kAdasum)), "adasum");
  CHECK_EQ(std::string(ReduceOpName(static_cast<ReduceOp>(9))), "invalid");
}

TEST(types_fall_into_families) {
  int reducible = 0;
  int half = 0;
  int floating = 0;
  int complex = 0;
  int integer = 0;
  int scaled = 0;
  int widened = 0;
  for (int32_t i = 0; i < 40; ++i) {
    const DType dtype = static_cast<DType>(i);
    reducible += IsReducible(dtype);
    half += IsHalf(dtype);
    floating += IsFloating(dtype);
    complex += IsComplex(dtype);
    integer += IsInteger(dtype);
    scaled += TakesScale(dtype);
    widened += AccumulationType(dtype) != dtype;
    CHECK(!IsReducible(dtype) || DTypeSize(dtype) != 0);
  }
  CHECK_EQ(reducible, 15);
  CHECK_EQ(half, 2);
  CHECK_EQ(floating, 4);
  CHECK_EQ(complex, 2);
  CHECK_EQ(integer, 8);
  CHECK_EQ(scaled, 6);
  CHECK_EQ(widened, 2);
  CHECK(IsReducible(DType::kBool) && !IsInteger(DType::kBool) && IsHalf(DType::kFloat16));
  CHECK(!IsReducible(DType::kFloat8E5m2) && DTypeSize(DType::kFloat8E5m2) == 1);
  CHECK(!IsFloating(DType::kFloat8E4m3fn) && DTypeSize(DType::kFloat8E4m3fn) == 1);
}

// One row a type: '+' for an operation that it takes, in the order of ReduceOp.
TEST(every_type_says_which_operations_it_takes) {
  const struct {
    DType dtype;
    const char* takes;  // sum average min max product and or xor
  } rows[] = {
      {DType::kInt8, "++++++++-"},         {DType::kInt16, "++++++++-"},
      {DType::kInt32, "++++++++-"},        {DType::kInt64, "++++++++-"},
      {DType::kUint8, "++++++++-"},        {DType::kUint16, "++++++++-"},
      {DType::kUint32, "++++++++-"},       {DType::kUint64, "++++++++-"},
      {DType::kBool, "--++-+++-"},         {DType::kFloat16, "+++++---+"},
      {DType::kBfloat16, "+++++---+"},     {DType::kFloat32, "+++++---+"},
      {DType::kFloat64, "+++++---+"},      {DType::kComplex64, "++--+----"},
      {DType::kComplex128, "++--+----"},   {DType::kFloat8E5m2, "---------"},
      {DType::kFloat8E4m3fn, "---------"}, {static_cast<DType>(7), "---------"},
  };
  for (const auto& row : rows) {
    for (int op = 0; op <= static_cast<int>(kLastReduceOp); ++op) {
      const Status status = CheckReducible(row.dtype, static_cast<ReduceOp>(op));
      CHECK_EQ_IN(
          status.ok(), row.takes[op] == '+',
          std::string(DTypeName(row.dtype)) + " " + ReduceOpName(static_cast<ReduceOp>(op)));
      if (!status.ok()) CHECK(status.code() == Code::kInvalidArgument);
    }
  }
}

TEST(a_refusal_says_what_was_expected_what_came_and_what_to_do) {
  const struct {
    DType dtype;
    ReduceOp op;
    const char* words[3];
  } cases[] = {
      {DType::kInt32, ReduceOp::kAdasum, {"all but adasum", "got adasum", "tf.float32"}},
      {DType::kComplex64, ReduceOp::kAdasum, {"sum, average", "got adasum", "real numbers"}},
      {DType::kBool, ReduceOp::kSum, {"logical_or", "got sum", "tf.cast(value, tf.int32)"}},
      {DType::kBool, ReduceOp::kAverage, {"that bool takes", "got average", "tf.float32"}},
      {DType::kBool, ReduceOp::kProduct, {"logical_and", "got product", "take logical_and"}},
      {DType::kComplex64, ReduceOp::kMin, {"sum, average or product", "got min", "tf.abs(value)"}},
      {DType::kComplex128, ReduceOp::kLogicalOr, {"complex128", "got logical_or", "tf.bool"}},
      {DType::kFloat32, ReduceOp::kLogicalAnd, {"float32", "got logical_and", "tf.bool"}},
      {DType::kFloat8E5m2, ReduceOp::kSum, {"bool", "got float8_e5m2", "tf.bfloat16"}},
      {static_cast<DType>(7), ReduceOp::kSum, {"complex", "got number 7", "Cast it"}},
  };
  for (const auto& c : cases) {
    const std::string message = CheckReducible(c.dtype, c.op).message();
    for (const char* word : c.words) {
      CHECK_EQ_IN(message.find(word) != std::string::npos, true, message + " lacks " + word);
    }
  }
}

TEST(every_float16_widens_to_its_value_and_comes_back) {
  for (uint32_t i = 0; i < 0x10000u; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const float value = HalfToFloat(bits);
    const double expected = HalfValue(bits);
    if (std::isnan(expected)) {
      CHECK(std::isnan(value));
      CHECK_EQ(FloatToHalf(value), bits | 0x0200);  // sign and payload kept, quiet
    } else {
      CHECK_EQ(static_cast<double>(value), expected);
      CHECK_EQ(FloatToHalf(value), bits);  // minus zero too
    }
  }
}

TEST(float16_rounds_to_nearest_even) {
  for (float value : InterestingFloats()) {
    const uint16_t half = FloatToHalf(value);
    if (std::isnan(value)) {
      CHECK(std::isnan(HalfValue(half)));
      continue;
    }
    CHECK_EQ_IN(HalfValue(half), NearestHalf(value), std::to_string(value));
    CHECK_EQ((half & 0x8000) != 0, std::signbit(value));
  }
  CHECK_EQ(FloatToHalf(65519.996f), 0x7bff);
  CHECK_EQ(FloatToHalf(65520.0f), 0x7c00);
  CHECK_EQ(FloatToHalf(0x1p-25f), 0x0000);         // a tie: zero is even
  CHECK_EQ(FloatToHalf(0x1.000002p-25f), 0x0001);  // just above it
}

TEST(bfloat16_rounds_to_nearest_even) {
  for (uint32_t i = 0; i < 0x10000u; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const float value = Bfloat16ToFloat(bits);
    CHECK_EQ(Bits(value), i << 16);
    if (std::isnan(value)) {
      CHECK_EQ(FloatToBfloat16(value), bits | 0x0040);
      continue;
    }
    CHECK_EQ(FloatToBfloat16(value), bits);
    if (std::isinf(value)) continue;
    const uint32_t even = i & 1u;
    CHECK_EQ(FloatToBfloat16(FromBits((i << 16) | 0x7fffu)), i);
    CHECK_EQ(FloatToBfloat16(FromBits((i << 16) | 0x8000u)), i + even);
    CHECK_EQ(FloatToBfloat16(FromBits((i << 16) | 0x8001u)), i + 1);
  }
  CHECK_EQ(FloatToBfloat16(FromBits(0x7f800001u)), 0x7fc0);  // a NaN stays one
}

struct Conversion {
  InstructionSet set;
  void (*widen)(const uint8_t* half, float* single, int64_t count);
  void (*round)(const float* single, uint8_t* half, int64_t count);
};
const std::vector<Conversion>& Conversions() {
  static const std::vector<Conversion> all = {
      {InstructionSet::kAny, HalvesToFloats, FloatsToHalves},
#if defined(__x86_64__)
      {InstructionSet::kAvx2, HalvesToFloatsAvx2, FloatsToHalvesAvx2},
      {InstructionSet::kAvx512, HalvesToFloatsAvx512, FloatsToHalvesAvx512},
#endif
  };
  return all;
}

TEST(vector_conversion_gives_the_scalar_bits) {
  std::vector<uint16_t> halves(0x10000);
  std::vector<float> wide;
  for (uint32_t i = 0; i < 0x10000u; ++i) {
    halves[i] = static_cast<uint16_t>(i);
    wide.push_back(HalfToFloat(halves[i]));
  }
  const std::vector<float> values = InterestingFloats();
  std::vector<uint16_t> rounded;
  for (float value : values) rounded.push_back(FloatToHalf(value));
  for (const Conversion& conversion : Conversions()) {
    if (!ProcessorHas(conversion.set)) continue;
    std::vector<float> singles(halves.size());
    conversion.widen(reinterpret_cast<const uint8_t*>(halves.data()), singles.data(), 0x10000);
    CHECK(std::memcmp(singles.data(), wide.data(), 4 * wide.size()) == 0);
    std::vector<uint16_t> out(values.size());
    conversion.round(values.data(), reinterpret_cast<uint8_t*>(out.data()),
                     static_cast<int64_t>(values.size()));
    CHECK(out == rounded);
  }
}

TEST(vector_conversion_takes_any_length_and_address) {
  std::vector<uint8_t> bytes(2 * 40 + 1);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(37 * i);
  for (const Conversion& conversion : Conversions()) {
    if (!ProcessorHas(conversion.set)) continue;
    for (int64_t n = 0; n <= 33; ++n) {
      std::vector<float> a(41, -1.0f);
      std::vector<float> b(41, -1.0f);
      conversion.widen(bytes.data() + 1, a.data(), n);
      HalvesToFloats(bytes.data() + 1, b.data(), n);
      CHECK(std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
      std::vector<uint8_t> c(90, 0xee);
      std::vector<uint8_t> d(90, 0xee);
      conversion.round(a.data(), c.data() + 1, n);
      FloatsToHalves(a.data(), d.data() + 1, n);
      CHECK(c == d);
    }
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
