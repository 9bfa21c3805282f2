// allreduce "butterfly" (recursive doubling): in step k every rank exchanges all it has with the
// rank whose number differs in bit k, and adds; after log2 size steps everybody has everything.
//
//            0     1     2     3
//   step 0   a <-> b     c <-> d         then 0, 1 have ab and 2, 3 have cd
//   step 1   ab <------> cd              0 with 2
//                  ab <------> cd        1 with 3
//
// Steps: log2 size. On the wire per rank: log2 size times the data. The fewest steps of all, for
// data so small that latency decides. Numbers of ranks that are not powers of two are folded
// (fold_steps.h): two steps more, and an odd rank that stands for two sends the data once more.
//
// Order of additions: pairs of neighbors (those folded together first), then pairs of pairs, ...:
// (x0 op x1) op (x2 op x3). Both partners of an exchange take their operands in the same order (a
// partial result before an input, else the lower rank's first): all ranks compute the same bits.
// Partial results of half types travel as float32; every rank rounds the same number once, at the
// end.
//
// In place (input == output): a reduction overwrites, element for element, what it reads; it comes
// `after` the send of the same step, which reads it too (and a link has its own copy of what was
// sent). A folded rank's result is copied in `after` its input was sent.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on allreduce (recursive
// doubling).
#include "collective/fold_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kFold = 0, kUnfold = 1, kExchange = 2 };  // kExchange + k

int Parts(const ScheduleArgs& /*args*/) { return 1; }

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  const Fold fold(args.rank, args.size);
  if (args.size == 1) {
    Add(&schedule, Local(0));
    return schedule;
  }
  if (fold.out()) {
    AddFoldedOut(&schedule, fold, kFold, kUnfold, 0);
    return schedule;
  }
  const int v = fold.virtual_rank();
  int32_t last = -1;  // the reduction before
  if (fold.StandsForTwo(v)) {
    last = Add(&schedule, ReduceInputs(kFold, 0, {args.rank - 1}, /*finish=*/false));
  }
  uint16_t phase = kExchange;
  for (int bit = 1; bit < fold.power; bit <<= 1, ++phase) {
    const int32_t peer = fold.RankOf(v ^ bit);
    const Place own = last < 0 ? Place::kInput : Place::kPartial;
    const int32_t sent = Add(&schedule, SendFrom(own, phase, 0, peer, last));
    Step step = ReduceInputs(phase, 0, {peer}, /*finish=*/2 * bit == fold.power);
    step.raw = bit == 1 && !fold.StandsForTwo(v ^ bit);
    step.own = own;
    step.after = {sent};
    last = Add(&schedule, step);
  }
  if (fold.StandsForTwo(v)) Add(&schedule, SendOutput(kUnfold, 0, args.rank - 1, last));
  return schedule;
}

}  // namespace

AlgorithmEntry ButterflyAllreduce() {
  return {"butterfly", CollectiveKind::kAllreduce, Supports, Make, Parts, "halving_doubling"};
}

}  // namespace tfdist
