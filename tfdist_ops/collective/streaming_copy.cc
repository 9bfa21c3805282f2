#include "collective/streaming_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tfdist {

#if defined(__SSE2__)
// Whole cache lines, four stores each: the processor joins them into one write.
void StreamingCopy(uint8_t* target, const uint8_t* source, size_t bytes) {
  constexpr size_t kLine = 64;
  const size_t odd = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  const size_t head = std::min(bytes, odd);
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + done);
    auto* to = reinterpret_cast<__m128i*>(target + done);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(target + done, source + done, bytes - done);
}

void StreamingFence() { _mm_sfence(); }
#else
void StreamingCopy(uint8_t* target, const uint8_t* source, size_t bytes) {
  std::memcpy(target, source, bytes);
}

void StreamingFence() {}
#endif

}  // namespace tfdist
