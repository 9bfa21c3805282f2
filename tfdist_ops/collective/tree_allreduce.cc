// allreduce "tree": up a binomial tree rooted at rank 0, and down again.
//
//   0 <--- 4 <--- 6 <--- 7        Leaves (odd ranks, and the last rank) send their inputs, inner
//   | <-+  | <--- 5               ranks what they have reduced; the result travels
//   |   +- 2 <--- 3               back along the same edges.
//   +----- 1
//
// Steps: 2 ceil(log2 size). On the wire: every rank but 0 sends the data up once; going down a rank
// sends it once for each child, rank 0 ceil(log2 size) times. Segments follow each other, so that
// the levels of the tree work at the same time. For small data: few messages on the longest path.
//
// Order of additions: a rank adds its subtrees to its own input, the smallest (nearest) first:
// ((x0 op x1) op (x2 op x3)) op ..., rank order with brackets. Partial results of half types travel
// as float32 and rank 0 rounds once.
//
// In place (input == output): partial results overwrite the input element for element, in the step
// that reads it; the result is copied in `after` the send of the partial (or the input of a leaf).
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on reduce and broadcast
// (binomial trees).
#include "collective/schedule.h"
#include "collective/steps.h"
#include "collective/tree_steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kUp = 0, kDown = 1 };

int Parts(const ScheduleArgs& /*args*/) { return 1; }

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  const TreeNode node = BinomialNode(args.rank, args.size, /*root=*/0);
  const int32_t last = AddTreeReduce(&schedule, node, kUp, 0);
  if (args.size == 1) Add(&schedule, Local(0));
  AddTreeBroadcast(&schedule, node, kDown, 0, Place::kOutput, last);
  return schedule;
}

}  // namespace

AlgorithmEntry TreeAllreduce() {
  return {"tree", CollectiveKind::kAllreduce, Supports, Make, Parts};
}

}  // namespace tfdist
