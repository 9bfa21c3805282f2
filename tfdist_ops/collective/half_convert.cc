#include "collective/half_convert.h"

#include <cstring>

#include "base/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfdist {

void HalvesToFloats(const uint8_t* half, float* single, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, half + 2 * i, sizeof(bits));
    single[i] = HalfToFloat(bits);
  }
}

void FloatsToHalves(const float* single, uint8_t* half, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = FloatToHalf(single[i]);
    std::memcpy(half + 2 * i, &bits, sizeof(bits));
  }
}

#if defined(__x86_64__)

__attribute__((target("avx2,f16c"))) void HalvesToFloatsAvx2(const uint8_t* half, float* single,
                                                             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + 2 * i));
    _mm256_storeu_ps(single + i, _mm256_cvtph_ps(bits));
  }
  HalvesToFloats(half + 2 * i, single + i, count - i);
}

__attribute__((target("avx2,f16c"))) void FloatsToHalvesAvx2(const float* single, uint8_t* half,
                                                             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(single + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(half + 2 * i), bits);
  }
  FloatsToHalves(single + i, half + 2 * i, count - i);
}

// Sixteen at a time, the last ones through a mask, so that nothing beyond the arrays is read or
// written. The intrinsics without a mask would do for the others, but compilers warn that their
// headers use undefined values.

__attribute__((target("avx512f,avx512bw,avx512vl"))) void HalvesToFloatsAvx512(const uint8_t* half,
                                                                               float* single,
                                                                               int64_t count) {
  const __mmask16 all = 0xffff;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half + 2 * i));
    _mm512_storeu_ps(single + i, _mm512_maskz_cvtph_ps(all, bits));
  }
  const auto rest = static_cast<__mmask16>((1u << (count - i)) - 1);
  if (rest == 0) return;
  const __m256i bits = _mm256_maskz_loadu_epi16(rest, half + 2 * i);
  _mm512_mask_storeu_ps(single + i, rest, _mm512_maskz_cvtph_ps(rest, bits));
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) void FloatsToHalvesAvx512(const float* single,
                                                                               uint8_t* half,
                                                                               int64_t count) {
  const __mmask16 all = 0xffff;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 values = _mm512_loadu_ps(single + i);
    const __m256i bits = _mm512_maskz_cvtps_ph(all, values, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(half + 2 * i), bits);
  }
  const auto rest = static_cast<__mmask16>((1u << (count - i)) - 1);
  if (rest == 0) return;
  const __m512 values = _mm512_maskz_loadu_ps(rest, single + i);
  const __m256i bits = _mm512_maskz_cvtps_ph(rest, values, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(half + 2 * i, rest, bits);
}

#endif

}  // namespace tfdist
