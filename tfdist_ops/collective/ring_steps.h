// The two halves of a ring, for the algorithms that are made of them.
#ifndef TFDIST_OPS_COLLECTIVE_RING_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_RING_STEPS_H_

#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {

struct Ring {
  std::vector<int32_t> ranks;   // in the order of the ring: each sends to the next
  std::vector<int32_t> slices;  // as many; position p sends slices[p] first
  int position = 0;             // of this rank
  int size() const { return static_cast<int>(ranks.size()); }
};

// All ranks in their order; `slices` is left to the algorithm.
Ring RingOf(const ScheduleArgs& args);

struct RingReduce {
  uint16_t phase = 0;
  Place own =
      Place::kInput;  // what is reduced: inputs, or partial results that `ready` has written
  After ready;
  bool finish = true;
  std::vector<After> each = {};  // instead of `ready`, by place in Ring::slices
};

// Reduce-scatter: in hop h position p sends slices[p - h] to the right and reduces
// slices[p - h - 1] from the left. After size - 1 hops position p holds the whole reduction of
// slices[p + 1]. Returns, by place in Ring::slices, the step that touches the slice last.
std::vector<int32_t> AddRingReduceScatter(Schedule* schedule, const Ring& ring,
                                          const RingReduce& reduce);

// All-gather of what position p has of slices[p + 1] in its output: in hop h it sends
// slices[p + 1 - h] and receives slices[p - h]. `last`: by place in Ring::slices, what must have
// touched the slice before it is sent or overwritten; on return, what writes it to the output.
void AddRingAllgather(Schedule* schedule, const Ring& ring, uint16_t phase,
                      std::vector<After>* last);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_RING_STEPS_H_
