// The arithmetic of reductions against plain scalar references, bit for bit.
#include "collective/reduce_kernels.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "reduce_forms.h"

namespace tfdist {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const DType kTypes[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                        DType::kBfloat16, DType::kInt32,   DType::kInt64};
const ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax};

using Bytes = std::vector<uint8_t>;

template <typename T>
Bytes ToBytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename T>
std::vector<T> FromBytes(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Reduces vectors of one type into a fresh output.
template <typename T>
std::vector<T> Raw(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs,
                   double prescale = 1.0, Finish finish = {}) {
  std::vector<const uint8_t*> pointers;
  for (const std::vector<T>& v : inputs) {
    pointers.push_back(reinterpret_cast<const uint8_t*>(v.data()));
  }
  std::vector<T> out(inputs[0].size());
  ReduceRaw(dtype, op, pointers, prescale, finish, reinterpret_cast<uint8_t*>(out.data()),
            static_cast<int64_t>(out.size()));
  return out;
}

// One element, by the definition: A is the type that adds.
template <typename A>
A Scalar(ReduceOp op, const std::vector<A>& values, A prescale, Finish finish) {
  A total = values[0] * prescale;
  for (size_t i = 1; i < values.size(); ++i) {
    const A v = values[i] * prescale;
    if (op == ReduceOp::kMin) {
      total = v < total ? v : total;
    } else if (op == ReduceOp::kMax) {
      total = v > total ? v : total;
    } else {
      total = total + v;
    }
  }
  if (finish.divide != 1) total = total / static_cast<A>(finish.divide);
  if (finish.multiply != 1.0) total = total * static_cast<A>(finish.multiply);
  return total;
}

template <typename T, typename A>
void ExpectLikeScalar(DType dtype, const std::function<T(std::mt19937_64&)>& draw, A (*widen)(T),
                      T (*round)(A), const std::vector<double>& prescales,
                      const std::vector<Finish>& finishes) {
  std::mt19937_64 random(11);
  for (int64_t elements : {1, 7, 8, 1023, 1024, 1025, 3001}) {
    for (size_t count : {1u, 2u, 3u, 4u, 8u}) {
      std::vector<std::vector<T>> inputs(count, std::vector<T>(static_cast<size_t>(elements)));
      for (std::vector<T>& input : inputs) {
        for (T& v : input) v = draw(random);
      }
      for (ReduceOp op : kOps) {
        for (double prescale : prescales) {
          for (const Finish& finish : finishes) {
            const std::vector<T> got = Raw(dtype, op, inputs, prescale, finish);
            for (size_t i = 0; i < got.size(); ++i) {
              std::vector<A> values;
              for (const std::vector<T>& input : inputs) values.push_back(widen(input[i]));
              const T want = round(Scalar<A>(op, values, static_cast<A>(prescale), finish));
              CHECK_EQ_IN(std::memcmp(&got[i], &want, sizeof(T)), 0,
                          std::string(DTypeName(dtype)) + " " + ReduceOpName(op) + " of " +
                              std::to_string(count) + ", element " + std::to_string(i) + " of " +
                              std::to_string(elements));
            }
          }
        }
      }
    }
  }
}

template <typename T>
T Same(T value) {
  return value;
}

const std::vector<Finish> kFloatFinishes = {{1, 1.0}, {3, 1.0}, {4, 1.0}, {1, 0.3}, {7, 0.3}};

TEST(float32_adds_in_order_without_fused_operations) {
  ExpectLikeScalar<float, float>(
      DType::kFloat32,
      [](std::mt19937_64& r) { return std::normal_distribution<float>(0, 100)(r); }, Same<float>,
      Same<float>, {1.0, 0.7}, kFloatFinishes);
}

TEST(float64_adds_in_order_without_fused_operations) {
  ExpectLikeScalar<double, double>(
      DType::kFloat64,
      [](std::mt19937_64& r) { return std::normal_distribution<double>(0, 100)(r); }, Same<double>,
      Same<double>, {1.0, 0.7}, kFloatFinishes);
}

TEST(float16_is_accumulated_in_float32_and_rounded_once) {
  ExpectLikeScalar<uint16_t, float>(
      DType::kFloat16,
      [](std::mt19937_64& r) { return FloatToHalf(std::normal_distribution<float>(0, 100)(r)); },
      HalfToFloat, FloatToHalf, {1.0, 0.7}, kFloatFinishes);
  // 2048 + 1 + 1: each addition rounded by itself would stay at 2048.
  const uint16_t one = FloatToHalf(1.0f);
  CHECK_EQ(HalfToFloat(Raw<uint16_t>(DType::kFloat16, ReduceOp::kSum,
                                     {{FloatToHalf(2048.0f)}, {one}, {one}})[0]),
           2050.0f);
  // The sum does not fit the type; its average does.
  const uint16_t big = FloatToHalf(60000.0f);
  CHECK_EQ(Raw<uint16_t>(DType::kFloat16, ReduceOp::kAverage, {{big}, {big}}, 1.0, {2, 1.0})[0],
           big);
}

TEST(bfloat16_is_accumulated_in_float32_and_rounded_once) {
  ExpectLikeScalar<uint16_t, float>(
      DType::kBfloat16,
      [](std::mt19937_64& r) {
        return FloatToBfloat16(std::normal_distribution<float>(0, 100)(r));
      },
      Bfloat16ToFloat, FloatToBfloat16, {1.0, 0.7}, kFloatFinishes);
  const uint16_t one = FloatToBfloat16(1.0f);
  CHECK_EQ(Bfloat16ToFloat(Raw<uint16_t>(DType::kBfloat16, ReduceOp::kSum,
                                         {{FloatToBfloat16(256.0f)}, {one}, {one}})[0]),
           258.0f);
}

TEST(integers_give_exact_results) {
  const std::vector<Finish> finishes = {{1, 1.0}, {3, 1.0}};
  ExpectLikeScalar<int32_t, int32_t>(
      DType::kInt32,
      [](std::mt19937_64& r) { return static_cast<int32_t>(r() % 2000001) - 1000000; },
      Same<int32_t>, Same<int32_t>, {1.0}, finishes);
  ExpectLikeScalar<int64_t, int64_t>(
      DType::kInt64,
      [](std::mt19937_64& r) { return static_cast<int64_t>(r() >> 8) - (int64_t{1} << 55); },
      Same<int64_t>, Same<int64_t>, {1.0}, finishes);
}

TEST(integers_wrap_and_averages_truncate_toward_zero) {
  constexpr int32_t kMax32 = std::numeric_limits<int32_t>::max();
  constexpr int32_t kMin32 = std::numeric_limits<int32_t>::min();
  constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
  CHECK_EQ(Raw<int32_t>(DType::kInt32, ReduceOp::kSum, {{kMax32}, {1}})[0], kMin32);
  CHECK_EQ(Raw<int64_t>(DType::kInt64, ReduceOp::kSum, {{kMin64}, {-1}})[0], kMax64);
  const auto average = [](int32_t a, int32_t b) {
    return Raw<int32_t>(DType::kInt32, ReduceOp::kAverage, {{a}, {b}}, 1.0, {2, 1.0})[0];
  };
  CHECK_EQ(average(-3, 0), -1);
  CHECK_EQ(average(3, 0), 1);
  CHECK_EQ(average(-8, 2), -3);
}

// Every place of the NaN, and enough elements for vector code and its remainder.
template <typename T>
void ExpectNanWins(DType dtype, T (*make)(double), bool (*is_nan)(T)) {
  for (ReduceOp op : kOps) {
    for (size_t place = 0; place < 3; ++place) {
      std::vector<std::vector<T>> inputs(3, std::vector<T>(37, make(2.0)));
      for (size_t i = 0; i < 37; i += 2) inputs[place][i] = make(kNan);
      const std::vector<T> out = Raw(dtype, op, inputs);
      for (size_t i = 0; i < 37; ++i) {
        CHECK_EQ_IN(is_nan(out[i]), i % 2 == 0,
                    std::string(DTypeName(dtype)) + " " + ReduceOpName(op));
      }
    }
  }
}

TEST(a_nan_on_any_rank_is_in_the_result) {
  ExpectNanWins<float>(
      DType::kFloat32, [](double v) { return static_cast<float>(v); },
      [](float v) { return std::isnan(v); });
  ExpectNanWins<double>(DType::kFloat64, Same<double>, [](double v) { return std::isnan(v); });
  ExpectNanWins<uint16_t>(
      DType::kFloat16, [](double v) { return FloatToHalf(static_cast<float>(v)); },
      [](uint16_t v) { return std::isnan(HalfToFloat(v)); });
  ExpectNanWins<uint16_t>(
      DType::kBfloat16, [](double v) { return FloatToBfloat16(static_cast<float>(v)); },
      [](uint16_t v) { return std::isnan(Bfloat16ToFloat(v)); });
}

TEST(infinities_are_ordinary_numbers) {
  const auto one = [](ReduceOp op, double a, double b) {
    return Raw<double>(DType::kFloat64, op, {{a}, {b}})[0];
  };
  CHECK_EQ(one(ReduceOp::kMin, -kInf, 3.0), -kInf);
  CHECK_EQ(one(ReduceOp::kMax, -kInf, 3.0), 3.0);
  CHECK_EQ(one(ReduceOp::kSum, kInf, 3.0), kInf);
  CHECK(std::isnan(one(ReduceOp::kSum, kInf, -kInf)));
  CHECK_EQ(HalfToFloat(Raw<uint16_t>(DType::kFloat16, ReduceOp::kSum,
                                     {{FloatToHalf(60000.0f)}, {FloatToHalf(60000.0f)}})[0]),
           INFINITY);
}

TEST(the_output_may_be_any_one_of_the_contributions) {
  std::mt19937 random(5);
  for (DType dtype : kTypes) {
    for (ReduceOp op : kOps) {
      for (size_t count : {1u, 2u, 3u, 5u}) {
        for (size_t target = 0; target < count; ++target) {
          const int64_t elements = 2500;
          std::vector<Bytes> inputs;
          for (size_t i = 0; i < count; ++i) {
            Bytes bytes(static_cast<size_t>(elements) * DTypeSize(dtype));
            for (uint8_t& b : bytes) b = static_cast<uint8_t>(random() & 0x3f);  // no NaN
            inputs.push_back(bytes);
          }
          std::vector<const uint8_t*> pointers;
          for (const Bytes& b : inputs) pointers.push_back(b.data());
          Bytes apart(inputs[0].size());
          const Finish finish{2, 1.0};
          ReduceRaw(dtype, op, pointers, 1.0, finish, apart.data(), elements);
          const std::vector<Bytes> before = inputs;
          ReduceRaw(dtype, op, pointers, 1.0, finish, inputs[target].data(), elements);
          for (size_t i = 0; i < count; ++i) {
            CHECK(inputs[i] == (i == target ? apart : before[i]));
          }
        }
      }
    }
  }
}

TEST(a_partial_result_is_not_prescaled_and_comes_first) {
  const std::vector<float> received = {1e8f, 3.0f, -5.0f};
  const std::vector<float> own = {1.0f, 10.0f, 4.0f};
  const Bytes r = ToBytes(received);
  Bytes out = ToBytes(own);  // in place
  ReducePartial(DType::kFloat32, ReduceOp::kSum, r.data(), out.data(), 0.5, {4, 2.0}, out.data(),
                3);
  const std::vector<float> got = FromBytes<float>(out);
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(got[i], (received[i] + own[i] * 0.5f) / 4.0f * 2.0f);
  }
  out = ToBytes(own);
  ReducePartial(DType::kFloat32, ReduceOp::kMin, r.data(), out.data(), -1.0, {}, out.data(), 3);
  CHECK(FromBytes<float>(out) == (std::vector<float>{-1.0f, -10.0f, -5.0f}));
}

// The bits of a half type's reduction in one go, and in steps through float32 on the way.
TEST(partial_results_of_half_types_are_float32_and_rounded_at_the_end) {
  std::mt19937 random(23);
  for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    const auto round = dtype == DType::kFloat16 ? FloatToHalf : FloatToBfloat16;
    const auto widen = dtype == DType::kFloat16 ? HalfToFloat : Bfloat16ToFloat;
    CHECK(AccumulationType(dtype) == DType::kFloat32);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (int64_t elements : {1, 9, 1024, 2077}) {
        const size_t n = static_cast<size_t>(elements);
        std::vector<std::vector<uint16_t>> inputs(3, std::vector<uint16_t>(n));
        for (auto& input : inputs) {
          for (uint16_t& v : input) v = round(std::normal_distribution<float>(1, 3)(random));
        }
        const auto at = [&](size_t i) {
          return reinterpret_cast<const uint8_t*>(inputs[i].data());
        };
        const Finish finish{3, 0.3};
        std::vector<uint16_t> whole(n);
        ReduceRaw(dtype, op, {at(0), at(1), at(2)}, 0.7, finish,
                  reinterpret_cast<uint8_t*>(whole.data()), elements);

        Bytes wide(4 * n + 1);  // at an odd address
        uint8_t* partial = wide.data() + 1;
        const uint8_t* own[] = {at(0)};
        Reduce({dtype, op, 0.7, {}, 0, true}, own, 1, partial, elements);
        for (size_t i = 0; i < n; ++i) {
          float value;
          std::memcpy(&value, partial + 4 * i, 4);
          CHECK_EQ(value, widen(inputs[0][i]) * 0.7f);
        }
        const uint8_t* second[] = {partial, at(1)};
        Reduce({dtype, op, 0.7, {}, 1, true}, second, 2, partial, elements);  // in place
        const Bytes before_last = wide;

        std::vector<uint16_t> stepped = inputs[2];  // in place on the own input
        ReducePartial(dtype, op, partial, reinterpret_cast<uint8_t*>(stepped.data()), 0.7, finish,
                      reinterpret_cast<uint8_t*>(stepped.data()), elements);
        CHECK(stepped == whole);

        const uint8_t* third[] = {partial, at(2)};
        Reduce({dtype, op, 0.7, {}, 1, true}, third, 2, partial, elements);
        const uint8_t* last[] = {partial};
        std::vector<uint16_t> finished(n);
        Reduce({dtype, op, 0.7, finish, 1, false}, last, 1,
               reinterpret_cast<uint8_t*>(finished.data()), elements);
        CHECK(finished == whole);

        // Without a factor the end of a partial result is its rounding, no copy.
        Reduce({dtype, op, 1.0, {}, 1, false}, last, 1, reinterpret_cast<uint8_t*>(finished.data()),
               elements);
        float value;
        std::memcpy(&value, partial, 4);
        CHECK_EQ(finished[0], round(value));

        // Two partial results.
        const uint8_t* two[] = {before_last.data() + 1, partial};
        Bytes sum(4 * n);
        Reduce({dtype, op, 0.7, finish, 2, true}, two, 2, sum.data(), elements);
        Bytes same(4 * n);
        ReduceRaw(DType::kFloat32, op, {two[0], two[1]}, 1.0, finish, same.data(), elements);
        CHECK(sum == same);
      }
    }
  }
}

TEST(a_float16_sum_beyond_its_range_survives_on_the_way) {
  const uint16_t big = FloatToHalf(60000.0f);
  const uint8_t* own = reinterpret_cast<const uint8_t*>(&big);
  float partial = 0;
  uint8_t* wide = reinterpret_cast<uint8_t*>(&partial);
  const uint8_t* both[] = {own, own};
  Reduce({DType::kFloat16, ReduceOp::kAverage, 1.0, {}, 0, true}, both, 2, wide, 1);
  CHECK_EQ(partial, 120000.0f);
  uint16_t out = 0;
  ReducePartial(DType::kFloat16, ReduceOp::kAverage, wide, own, 1.0, {3, 1.0},
                reinterpret_cast<uint8_t*>(&out), 1);
  CHECK_EQ(out, big);
}

// The bytes that go to other ranks while they are computed are those that this rank keeps.
TEST(a_second_output_gets_the_bytes_of_the_first) {
  std::mt19937 random(19);
  for (DType dtype : kTypes) {
    for (const size_t count : {size_t{1}, size_t{3}}) {
      std::vector<Bytes> inputs(count, Bytes(1500 * DTypeSize(dtype)));
      std::vector<const uint8_t*> pointers;
      for (Bytes& input : inputs) {
        for (uint8_t& v : input) v = static_cast<uint8_t>(random() & 0x3f);  // no NaN
        pointers.push_back(input.data());
      }
      Bytes out(inputs[0].size());
      Bytes also(inputs[0].size());
      Reduction what;
      what.dtype = dtype;
      what.op = dtype == DType::kBool ? ReduceOp::kLogicalXor : ReduceOp::kSum;
      Reduce(what, pointers.data(), static_cast<int>(count), out.data(), 1500, also.data());
      CHECK_EQ_IN(out == also, true, DTypeName(dtype));
    }
  }
}

TEST(any_address_will_do_and_nothing_beside_the_output_is_touched) {
  std::mt19937 random(9);
  for (DType dtype : kTypes) {
    for (int64_t elements : {0, 1, 5, 100, 1027}) {
      const size_t bytes = static_cast<size_t>(elements) * DTypeSize(dtype);
      Bytes a(bytes);
      Bytes b(bytes);
      for (uint8_t& v : a) v = static_cast<uint8_t>(random() & 0x3f);
      for (uint8_t& v : b) v = static_cast<uint8_t>(random() & 0x3f);
      Bytes aligned(bytes);
      ReduceRaw(dtype, ReduceOp::kSum, {a.data(), b.data()}, 1.0, {}, aligned.data(), elements);
      Bytes shifted_a(bytes + 1, 0xee);
      Bytes shifted_b(bytes + 3, 0xee);
      std::copy(a.begin(), a.end(), shifted_a.begin() + 1);
      std::copy(b.begin(), b.end(), shifted_b.begin() + 3);
      Bytes out(bytes + 20, 0xee);
      ReduceRaw(dtype, ReduceOp::kSum, {shifted_a.data() + 1, shifted_b.data() + 3}, 1.0, {},
                out.data() + 5, elements);
      CHECK(Bytes(out.begin() + 5, out.begin() + 5 + static_cast<int64_t>(bytes)) == aligned);
      for (size_t i = 0; i < 5; ++i) CHECK_EQ(out[i], 0xee);
      for (size_t i = bytes + 5; i < out.size(); ++i) CHECK_EQ(out[i], 0xee);
    }
  }
}

TEST(copies_keep_every_bit_of_every_type) {
  std::mt19937 random(13);
  for (int32_t t = 1; t < 24; ++t) {
    const DType dtype = static_cast<DType>(t);
    Bytes in(333 * DTypeSize(dtype));
    for (uint8_t& v : in) v = static_cast<uint8_t>(random());  // among them NaNs with a payload
    Bytes copied(in.size());
    Bytes reduced(in.size());
    CopyScaled(dtype, in.data(), 1.0, copied.data(), 333);
    ReduceRaw(dtype, ReduceOp::kSum, {in.data()}, 1.0, {}, reduced.data(), 333);
    CHECK(copied == in && reduced == in);
    CopyScaled(dtype, in.data(), 1.0, in.data(), 333);
    CHECK(copied == in);
  }
}

TEST(copies_scale_in_the_accumulation_type) {
  const std::vector<float> in = {1.0f, -3.0f, 0.1f};
  std::vector<float> out(3);
  CopyScaled(DType::kFloat32, reinterpret_cast<const uint8_t*>(in.data()), 0.1,
             reinterpret_cast<uint8_t*>(out.data()), 3);
  for (size_t i = 0; i < 3; ++i) CHECK_EQ(out[i], in[i] * 0.1f);
  const uint16_t half = FloatToHalf(3.0f);
  uint16_t scaled = 0;
  CopyScaled(DType::kFloat16, reinterpret_cast<const uint8_t*>(&half), 1.0 / 3.0,
             reinterpret_cast<uint8_t*>(&scaled), 1);
  CHECK_EQ(scaled, FloatToHalf(1.0f));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
