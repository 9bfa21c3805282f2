// A copy that goes past the caches: for results so large that nothing of them would still be in a
// cache when they are read, and for those that a processor reads which shares no cache. An ordinary
// store first fetches the line that it overwrites. And how to read what was written like this.
#ifndef TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_
#define TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// memcpy, whose target other threads may read after a StreamingFence of this one, as they may read
// any store after a release. Where the processor has no such stores it is memcpy.
void StreamingCopy(uint8_t* target, const uint8_t* source, size_t bytes);
void StreamingFence();

// Begins to read into a cache what is soon wanted. Processors do it by themselves where they see a
// run, but not beyond a page, and too late for what lies in memory.
inline void FetchAhead(const uint8_t* source, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(source + i);
}

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_
