// reduce "binomial": up a binomial tree (tree_steps.h) to the root; the others keep their inputs.
//
//   v = (rank - root) mod size     0 <--- 4 <--- 6 <--- 7
//                                  | <-+  | <--- 5
//                                  |   +- 2 <--- 3
//                                  +----- 1
//
// Steps: ceil(log2 size). On the wire: every rank but the root sends the data once; the root
// receives it ceil(log2 size) times. Segments follow each other.
//
// Order of additions: a rank adds its subtrees to its own input, the smallest first, the operands
// of an addition in the order of their ranks, but partial results before inputs. Partial results of
// half types travel as float32 and the root rounds once.
//
// In place (input == output): ranks other than the root keep partial results in memory of their
// own, because their output is their own input. The root overwrites element for element what it
// reads.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on reduce (binomial tree).
#include "collective/schedule.h"
#include "collective/steps.h"
#include "collective/tree_steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  schedule.private_partials = args.rank != args.root;
  AddTreeReduce(&schedule, BinomialNode(args.rank, args.size, args.root), 0, 0);
  if (args.rank != args.root) Add(&schedule, LocalCopy(0));
  if (args.size == 1) Add(&schedule, Local(0));
  return schedule;
}

}  // namespace

AlgorithmEntry BinomialReduce() { return {"binomial", CollectiveKind::kReduce, Supports, Make}; }

}  // namespace tfdist
