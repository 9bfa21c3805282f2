#include "collective/adasum.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace tfdist {
namespace {

// Partial sums, so that no addition waits for the one before it. An element's index alone decides
// which of them it is added to. A vector register holds several of them.
constexpr int64_t kLanes = 8;
using Lanes = std::array<double, kLanes>;

double Total(const Lanes& lanes) {
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

// Buffers may lie at any address.
template <typename T>
Lanes Load(const uint8_t* at, int64_t count) {
  std::array<T, kLanes> values{};  // those beyond `count` add nothing
  std::memcpy(values.data(), at, static_cast<size_t>(count) * sizeof(T));
  Lanes out;
  for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<double>(values[i]);
  return out;
}

template <typename T>
Dots DotsOfType(const uint8_t* a, const uint8_t* b, int64_t n) {
  Lanes ab{}, aa{}, bb{};
  const auto add = [&](int64_t begin, int64_t count) {
    const auto shift = static_cast<size_t>(begin) * sizeof(T);
    const Lanes x = Load<T>(a + shift, count);
    const Lanes y = Load<T>(b + shift, count);
    for (size_t i = 0; i < x.size(); ++i) {
      ab[i] += x[i] * y[i];
      aa[i] += x[i] * x[i];
      bb[i] += y[i] * y[i];
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(i, kLanes);
  if (i < n) add(i, n - i);
  return {Total(ab), Total(aa), Total(bb)};
}

template <typename T>
void AddPairOfType(const PairFactors& factors, uint8_t* a, const uint8_t* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i, a += sizeof(T), b += sizeof(T)) {
    T x, y;
    std::memcpy(&x, a, sizeof(T));
    std::memcpy(&y, b, sizeof(T));
    x = static_cast<T>(factors.a * static_cast<double>(x) + factors.b * static_cast<double>(y));
    std::memcpy(a, &x, sizeof(T));
  }
}

double FactorOf(double ab, double square) {
  // A vector with a smaller square counts as zero: the quotient would be inaccurate. A NaN is not
  // smaller and propagates.
  static const double kLeast = std::sqrt(std::numeric_limits<double>::min());
  return square < kLeast ? 1.0 : 1.0 - ab / (2.0 * square);
}

}  // namespace

PairFactors FactorsOf(const Dots& dots) {
  return {FactorOf(dots.ab, dots.aa), FactorOf(dots.ab, dots.bb)};
}

Dots DotsOf(DType dtype, const uint8_t* a, const uint8_t* b, int64_t n) {
  return dtype == DType::kFloat64 ? DotsOfType<double>(a, b, n) : DotsOfType<float>(a, b, n);
}

void AddPair(DType dtype, const PairFactors& factors, uint8_t* a, const uint8_t* b, int64_t n) {
  if (dtype == DType::kFloat64) {
    AddPairOfType<double>(factors, a, b, n);
  } else {
    AddPairOfType<float>(factors, a, b, n);
  }
}

}  // namespace tfdist
