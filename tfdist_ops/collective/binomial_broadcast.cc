// broadcast "binomial": a binomial tree rooted at `root`, pipelined by segments.
//
// With v = (rank - root) mod size: the parent of v is v without its lowest set bit; the children of
// v are v + 2^k for the 2^k below that bit (all of them for the root), as far as they are < size.
// Largest subtree first. Eight ranks:
//
//   v = 0 ---> 4 ---> 6 ---> 7
//       |      +----> 5
//       +----> 2 ---> 3
//       +----> 1
//
// Steps: ceil(log2 size). On the wire: the root sends ceil(log2 size) times the data, a leaf
// nothing, all ranks together size - 1 times. A rank hands a segment on as soon as it has it.
//
// In place (input == output): only the root has an input and it receives nothing; its local copy
// writes the bytes that are there. Other ranks write every element once, before any send reads it.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on broadcast (tree).
#include "collective/schedule.h"
#include "collective/steps.h"
#include "collective/tree_steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  const TreeNode node = BinomialNode(args.rank, args.size, args.root);
  AddTreeBroadcast(&schedule, node, 0, 0, Place::kInput, {});
  if (args.rank == args.root) Add(&schedule, LocalCopy(0));
  return schedule;
}

}  // namespace

AlgorithmEntry BinomialBroadcast() {
  return {"binomial", CollectiveKind::kBroadcast, Supports, Make};
}

}  // namespace tfdist
