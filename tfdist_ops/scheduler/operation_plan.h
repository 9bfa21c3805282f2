// Plan: from an agreed collective to what this rank does for it: the list of steps and the slices
// of memory that they work on. Pure: values in, values out; the engine runs what comes out
// (operation.h).
#ifndef TFDIST_OPS_SCHEDULER_OPERATION_PLAN_H_
#define TFDIST_OPS_SCHEDULER_OPERATION_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "collective/selection.h"
#include "collective/slicing.h"
#include "scheduler/request_info.h"

namespace tfdist {

// The process set of a collective as one of its members sees it.
struct SetView {
  std::vector<int32_t> ranks;    // global ranks, ascending; schedules speak of indices into it
  std::vector<int32_t> host_of;  // host by index, any numbers; empty: all on one host
  int index = 0;                 // of this rank
  SizeRules rules = {};          // of the tuning file, for these hosts
  int size() const { return static_cast<int>(ranks.size()); }
};

struct PlanInput {
  const RequestInfo& info;                 // of the first of the fused requests
  const std::vector<TensorView>& tensors;  // of all of them
  const std::vector<int64_t>& rows;        // as announced: AgreedRows of scheduler/row_counts.h
  const SetView& set;
};

struct Plan {
  Schedule schedule;
  std::vector<Slice> slices;
  int64_t segment_bytes = 0;  // at most TFDIST_SEGMENT_BYTES, the same on all ranks
};

// Fails when the announced rows do not fit, when the root is not in the set, or when the kind has
// no algorithm for the type: all of them bugs of the caller, who has checked requests before.
//
// Tensors of the kinds with rows: `output` holds OutputRows() rows. gather: non-roots need no
// output. scatter: non-roots need no input. sendrecv: the sender needs no output, the receiver no
// input.
StatusOr<Plan> PlanOperation(const PlanInput& input, const Config& config);

// The bytes that decide on the algorithm of a request (collective/selection.h), from what all ranks
// know; `rows` as in PlanInput.
int64_t DecidingBytes(const RequestInfo& info, const std::vector<int64_t>& rows);

// The algorithm of a request that is fused with nothing.
StatusOr<const AlgorithmEntry*> AlgorithmAlone(const RequestInfo& info,
                                               const std::vector<int64_t>& rows, const SetView& set,
                                               const Config& config);

// The configured algorithm of a kind; "auto" where there is no choice.
const std::string& WantedAlgorithm(CollectiveKind kind, const Config& config);
// An error that names the variable and lists what is known, if a configured name is unknown.
Status CheckAlgorithmNames(const Config& config);
// "auto, ring, pairwise, ..."; whether `name` is one of them.
std::string KnownAlgorithms(CollectiveKind kind);
bool IsAlgorithm(CollectiveKind kind, const std::string& name);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_OPERATION_PLAN_H_
