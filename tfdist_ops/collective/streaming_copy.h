// A copy that goes past the caches: for results so large that nothing of them would still be in a
// cache when they are read. An ordinary store first fetches the line that it overwrites.
#ifndef TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_
#define TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// memcpy, whose target other threads may read when it has returned, as after any store that is
// followed by a release. Where the processor has no such stores it is memcpy.
void StreamingCopy(uint8_t* target, const uint8_t* source, size_t bytes);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_STREAMING_COPY_H_
