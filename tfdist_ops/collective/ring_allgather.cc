// allgather "ring": the slice of every rank travels round the ring, size - 1 hops to the right.
//
// The ranks stand in the order of ring_order.h; below, "rank" is a rank's place in it.
//
//   hop 0: rank r sends its own slice r; hop h: the slice r - h that it received in hop h - 1.
//
//            0      1      2      3
//   slice 0  a ---> a ---> a ---> a
//   slice 1  b      b ---> b ---> b ---> (0)
//   slice 2  c ---> c      c ---> c ---> (0)
//   slice 3  d ---> d ---> d      d ---> (0)
//
// Steps: size - 1 hops. On the wire per rank: all slices but that of its right neighbor, so
// (size - 1) / size of the result when slices are equal. Slices may have any length, including
// zero.
//
// In place (the input lies at its place in the output): a rank's own slice is never received, and
// the local copy writes the bytes that are already there; every other slice is written once, by
// the kCopy that the send to the right comes `after`.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on allgather (ring).
#include "collective/ring_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  const int size = args.size;
  const Ring ring = RingOf(args);
  const auto rank_at = [&](int position) {
    return ring.ranks[static_cast<size_t>(Mod(position, size))];
  };
  const int32_t left = rank_at(ring.position - 1);
  const int32_t right = rank_at(ring.position + 1);
  Schedule schedule;
  int32_t copied = -1;
  for (int hop = 0; hop < size - 1; ++hop) {
    const int32_t out = rank_at(ring.position - hop);
    Add(&schedule, hop == 0 ? SendInput(0, out, right) : SendOutput(0, out, right, copied));
    copied = Add(&schedule, CopyFrom(0, rank_at(ring.position - hop - 1), left, {}));
  }
  Add(&schedule, LocalCopy(args.rank));
  return schedule;
}

}  // namespace

AlgorithmEntry RingAllgather() { return {"ring", CollectiveKind::kAllgather, Supports, Make}; }

}  // namespace tfdist
