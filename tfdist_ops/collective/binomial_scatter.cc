// scatter "binomial": down a binomial tree (tree_steps.h) from the root; a rank keeps its slice and
// sends on those of the ranks below it.
//
//   v = (rank - root) mod size     0 ---> 4 5 6 7 ---> 6 7 ---> 7
//                                  |            +----> 5
//                                  +----> 2 3 ---> 3
//                                  +----> 1
//
// Steps: ceil(log2 size). On the wire: a rank sends each child all slices of the child's subtree,
// so that a slice is sent once for each 1 bit in the v of its rank: fewer peers for the root, more
// bytes in all than the star. Slices may have any length, including zero.
//
// In place (the root's output is its slice's place in its input): the root writes that slice alone,
// with the bytes that are there. Other ranks hold what passes through in memory of their own.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on scatter (binomial tree).
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
  if (!is_root) Add(&schedule, CopyFrom(0, args.rank, node.parent, {}));
  // Farthest child first: most ranks wait below it.
  for (auto child = node.children.rbegin(); child != node.children.rend(); ++child) {
    for (int32_t slice : BinomialSubtree(child->rank, args.size, args.root)) {
      if (is_root) {
        Add(&schedule, SendInput(0, slice, child->rank));
      } else {
        const int32_t held = Add(&schedule, HoldFrom(0, slice, node.parent));
        Add(&schedule, SendHeld(0, slice, child->rank, held));
      }
    }
  }
  if (is_root) Add(&schedule, LocalCopy(args.rank));
  return schedule;
}

}  // namespace

AlgorithmEntry BinomialScatter() { return {"binomial", CollectiveKind::kScatter, Supports, Make}; }

}  // namespace tfdist
