// reduce_scatter "ring": size - 1 hops to the right; every slice ends at the rank that it is for.
//
// The ranks stand in the order of ring_order.h; below, "rank" is a rank's place in it.
//
//   hop 0: rank r sends slice r - 1; hop h: the slice r - 1 - h that it received in hop h - 1, with
//   its own input added. Three ranks, a b c the inputs:
//            0      1      2
//   slice 0         b ---> bc ---> (0) bca
//   slice 1                c ---> (0) ca ---> cab
//   slice 2  a ---> ab ---> abc
//
// Steps: size - 1 hops. On the wire per rank: all slices but its own, (size - 1) / size of the data
// when slices are equal; slices may have any length, including zero. Segments follow each other.
//
// Order of additions: slice s is ((x[s+1] op x[s+2]) op ...) op x[s], ranks mod size. Partial
// results of half types travel as float32 and are rounded once, at the end.
//
// In place (the output is the place of this rank's slice in the input): partial results lie in
// memory of their own, since a rank's output has room for its slice alone; that slice's input is
// read by the last reduction, which writes the same elements. No other input is written.
//
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", J. Parallel Distrib. Comput. 69 (2009), the first half.
#include "collective/ring_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  schedule.private_partials = true;
  if (args.size == 1) {
    Add(&schedule, Local(0));
    return schedule;
  }
  Ring ring = RingOf(args);
  for (int p = 0; p < args.size; ++p) {  // so that position p ends with the slice of its rank
    ring.slices.push_back(ring.ranks[static_cast<size_t>(Mod(p - 1, args.size))]);
  }
  AddRingReduceScatter(&schedule, ring, {});
  return schedule;
}

}  // namespace

AlgorithmEntry RingReduceScatter() {
  return {"ring", CollectiveKind::kReduceScatter, Supports, Make};
}

}  // namespace tfdist
