#include "collective/half_convert.h"

#include <cstring>

#include "base/dtype.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tfdist {

void HalvesToFloatsScalar(const uint8_t* half, float* single, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, half + 2 * i, sizeof(bits));
    single[i] = HalfToFloat(bits);
  }
}

void FloatsToHalvesScalar(const float* single, uint8_t* half, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = FloatToHalf(single[i]);
    std::memcpy(half + 2 * i, &bits, sizeof(bits));
  }
}

#if defined(__x86_64__)

namespace {

__attribute__((target("avx2,f16c"))) void HalvesToFloatsF16c(const uint8_t* half, float* single,
                                                             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + 2 * i));
    _mm256_storeu_ps(single + i, _mm256_cvtph_ps(bits));
  }
  HalvesToFloatsScalar(half + 2 * i, single + i, count - i);
}

__attribute__((target("avx2,f16c"))) void FloatsToHalvesF16c(const float* single, uint8_t* half,
                                                             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(single + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(half + 2 * i), bits);
  }
  FloatsToHalvesScalar(single + i, half + 2 * i, count - i);
}

}  // namespace

bool HasAvx2AndF16c() {
  // The processor does not change: asked once.
  static const bool has = [] {
    unsigned int eax = 0;
    unsigned int ebx = 0;
    unsigned int ecx = 0;
    unsigned int edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2") != 0;  // avx2: the system saves the registers too
  }();
  return has;
}

void HalvesToFloats(const uint8_t* half, float* single, int64_t count) {
  if (HasAvx2AndF16c()) return HalvesToFloatsF16c(half, single, count);
  HalvesToFloatsScalar(half, single, count);
}

void FloatsToHalves(const float* single, uint8_t* half, int64_t count) {
  if (HasAvx2AndF16c()) return FloatsToHalvesF16c(single, half, count);
  FloatsToHalvesScalar(single, half, count);
}

#else

bool HasAvx2AndF16c() { return false; }

void HalvesToFloats(const uint8_t* half, float* single, int64_t count) {
  HalvesToFloatsScalar(half, single, count);
}

void FloatsToHalves(const float* single, uint8_t* half, int64_t count) {
  FloatsToHalvesScalar(single, half, count);
}

#endif

}  // namespace tfdist
