// Plan: from an agreed collective to what this rank does for it: the list of steps and the slices
// of memory that they work on. Pure: values in, values out; the engine runs what comes out
// (operation.h).
#ifndef TFDIST_OPS_SCHEDULER_PLAN_H_
#define TFDIST_OPS_SCHEDULER_PLAN_H_

#include <cstdint>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "collective/slicing.h"
#include "scheduler/message.h"

namespace tfdist {

// The process set of a collective as one of its members sees it.
struct SetView {
  std::vector<int32_t> ranks;    // global ranks, ascending; schedules speak of indices into it
  std::vector<int32_t> host_of;  // host by index, any numbers; empty: all on one host
  int index = 0;                 // of this rank
  int size() const { return static_cast<int>(ranks.size()); }
};

struct PlanInput {
  const RequestInfo& info;                 // of any of the fused requests
  const std::vector<TensorView>& tensors;  // of all of them
  // What the leader announced (Response::rows), by index in the set. allgather and gather: rows of
  // each rank's tensor; reduce_scatter and scatter: rows each rank gets; alltoall: size x size,
  // row-major by sender; other kinds: empty.
  const std::vector<int64_t>& rows;
  const SetView& set;
};

struct Plan {
  Schedule schedule;
  std::vector<Slice> slices;
};

// Fails when the announced rows do not fit, when the root is not in the set, or when the kind has
// no algorithm for the type: all of them bugs of the caller, who has checked requests before.
StatusOr<Plan> PlanOperation(const PlanInput& input, const Config& config);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_PLAN_H_
