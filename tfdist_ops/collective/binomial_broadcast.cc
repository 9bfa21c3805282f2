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

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  const int size = args.size;
  const int root = args.root;
  const int relative = Mod(args.rank - root, size);
  int bit = 1;  // ends as the lowest set bit of `relative`; for the root the power >= size
  while (bit < size && (relative & bit) == 0) bit <<= 1;
  Schedule schedule;
  int32_t copied = -1;
  if (relative != 0) {
    copied = Add(&schedule, CopyFrom(0, 0, Mod(relative - bit + root, size), /*after=*/-1));
  }
  for (int child_bit = bit >> 1; child_bit > 0; child_bit >>= 1) {
    if (relative + child_bit >= size) continue;
    const int32_t child = (relative + child_bit + root) % size;
    Add(&schedule, relative == 0 ? SendInput(0, 0, child) : SendOutput(0, 0, child, copied));
  }
  if (relative == 0) Add(&schedule, Local(0));
  return schedule;
}

}  // namespace

AlgorithmEntry BinomialBroadcast() {
  return {"binomial", CollectiveKind::kBroadcast, Supports, Make};
}

}  // namespace tfdist
