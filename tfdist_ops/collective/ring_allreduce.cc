// allreduce "ring": reduce-scatter, then all-gather, each with size - 1 hops to the right.
//
// The ranks stand in the order of ring_order.h; below, "rank" is a rank's place in it.
//
// Four ranks; a b c d are the ranks' inputs of a slice, column = rank, row = slice:
//
//   reduce-scatter, hop 0: rank r sends slice r          hop 1: rank r sends slice r - 1
//            0      1      2      3                            0      1      2      3
//   slice 0  a ---> ab                                 0              ab ---> abc
//   slice 1         b ---> bc                          1                     bc ---> bcd
//   slice 2                c ---> cd                   2  cda <--- (3: cd)
//   slice 3  da <--- (3: d)                            3  da ---> dab
//
//   After size - 1 hops rank r holds the whole sum of slice (r + 1) mod size ("owns" it): it
//   divides and scales (`finish`). all-gather: in hop 0 rank r sends slice r + 1, then always the
//   one that it received in the hop before, until everybody has every slice.
//
// Steps: 2 (size - 1) hops. On the wire per rank: 2 (size - 1) / size of the data, the least that
// any allreduce can send. Segments of a slice follow each other, so hops overlap.
//
// Order of additions: slice s is ((x[s] op x[s+1]) op x[s+2]) ..., ranks mod size: fixed, and equal
// on all ranks since one rank computes it. The first reduction adds two untouched inputs (`raw`, so
// that a prescale reaches both), later ones a partial result and the rank's input. Partial results
// of half types travel as float32, so that they are rounded once: (3 size - 4) / size of the data.
//
// In place (input == output): a rank reads its input of slice s once, either to send it (s == rank)
// or in its kReduce of s, which writes the same elements that it reads. The output of s is written
// once more, by the kCopy of the all-gather, which is `after` the send that reads it. (It could not
// come earlier in any case: the finished slice contains what that send carried.)
//
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", J. Parallel Distrib. Comput. 69 (2009), the algorithm on a logical ring.
#include "collective/ring_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kReduceScatter = 0, kAllgather = 1 };

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  if (args.size == 1) {
    Add(&schedule, Local(0));
    return schedule;
  }
  Ring ring = RingOf(args);
  for (int32_t s = 0; s < args.size; ++s) ring.slices.push_back(s);
  RingReduce reduce;
  reduce.phase = kReduceScatter;
  const std::vector<int32_t> touched = AddRingReduceScatter(&schedule, ring, reduce);
  std::vector<After> last(touched.begin(), touched.end());
  AddRingAllgather(&schedule, ring, kAllgather, &last);
  return schedule;
}

}  // namespace

AlgorithmEntry RingAllreduce() { return {"ring", CollectiveKind::kAllreduce, Supports, Make}; }

}  // namespace tfdist
