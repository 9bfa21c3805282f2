// gather "binomial": up a binomial tree (tree_steps.h) to the root; a rank sends on what comes from
// below it, slice by slice.
//
//   v = (rank - root) mod size     0 <--- 4 5 6 7 <--- 6 7 <--- 7
//                                  | <-+        | <--- 5
//                                  |   +- 2 3 <--- 3
//                                  +----- 1
//
// Steps: ceil(log2 size). On the wire: a rank sends all slices of its subtree to its parent, so
// that a slice is sent once for each 1 bit in the v of its rank: fewer peers for the root, more
// bytes in all than the star. Slices may have any length, including zero.
//
// In place (the root's input lies at its place in its output): that slice is never received; every
// other one is written once. Other ranks hold what passes through in memory of their own.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on gather (binomial tree).
#include "collective/schedule.h"
#include "collective/steps.h"
#include "collective/tree_steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  const TreeNode node = BinomialNode(args.rank, args.size, args.root);
  const bool is_root = node.parent < 0;
  Add(&schedule, is_root ? LocalCopy(args.rank) : SendInput(0, args.rank, node.parent));
  for (const TreeNode::Child& child : node.children) {
    for (int32_t slice : BinomialSubtree(child.rank, args.size, args.root)) {
      if (is_root) {
        Add(&schedule, CopyFrom(0, slice, child.rank, {}));
      } else {
        const int32_t held = Add(&schedule, HoldFrom(0, slice, child.rank));
        Add(&schedule, SendHeld(0, slice, node.parent, held));
      }
    }
  }
  return schedule;
}

}  // namespace

AlgorithmEntry BinomialGather() { return {"binomial", CollectiveKind::kGather, Supports, Make}; }

}  // namespace tfdist
