// A copy that goes past the caches: for results so large that nothing of them would still be in a
// cache when they are read, and for those read by a processor that shares no cache with this one.
// An ordinary store first fetches the line that it overwrites. Also the prefetching for reads of
// what was written this way.
#ifndef TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_
#define TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// As memcpy, but before other threads may read the target, this thread must call StreamingFence and
// then release it, as any store. Where the processor has no such stores it is a plain memcpy.
void StreamingCopy(uint8_t* target, const uint8_t* source, size_t bytes);
void StreamingFence();

// Begins to read into a cache what is soon needed. Processors do this by themselves for sequential
// reads, but not beyond a page, and too late for what lies in memory.
inline void FetchAhead(const uint8_t* source, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(source + i);
}

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_
