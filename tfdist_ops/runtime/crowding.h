// Whether the ranks of a host are more than its processors: then a rank that waits gives its own
// away, so that the others have their turns.
#ifndef TFDIST_OPS_RUNTIME_CROWDING_H_
#define TFDIST_OPS_RUNTIME_CROWDING_H_

#include <sched.h>

#include <vector>

namespace tfdist {

// `own`: the processors that this rank may use. `others`: those of the other ranks of its host as
// far as they are known, out of `local_size` - 1; the rest may use any.
inline bool IsCrowded(int local_size, const cpu_set_t& own, const std::vector<cpu_set_t>& others) {
  int sharing = local_size;
  for (const cpu_set_t& other : others) {
    cpu_set_t common;
    CPU_AND(&common, &own, &other);
    if (CPU_COUNT(&common) == 0) --sharing;
  }
  return sharing > CPU_COUNT(&own);
}

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_CROWDING_H_
