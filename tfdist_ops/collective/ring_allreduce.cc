// allreduce "ring": reduce-scatter, then all-gather, each with size - 1 hops to the right.
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
// that a prescale reaches both), later ones a partial result and the own input. Every hop would
// round a half type again: those are not supported here.
//
// In place (input == output): a rank reads its input of slice s once, either to send it (s == rank)
// or in its kReduce of s, which writes the same elements that it reads. The output of s is written
// once more, by the kCopy of the all-gather, which is `after` the send that reads it. (It could not
// come earlier in any case: the finished slice contains what that send carried.)
//
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", J. Parallel Distrib. Comput. 69 (2009), the algorithm on a logical ring.
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kReduceScatter = 0, kAllgather = 1 };

bool Supports(const ScheduleArgs& /*args*/, DType dtype) {
  return IsReducible(dtype) && !IsHalf(dtype);
}

// Returns, by slice, the index of the step that reads or writes it last.
std::vector<int32_t> AddReduceScatter(Schedule* schedule, int rank, int size) {
  const int32_t left = Mod(rank - 1, size);
  const int32_t right = Mod(rank + 1, size);
  std::vector<int32_t> last(static_cast<size_t>(size), -1);
  for (int hop = 0; hop < size - 1; ++hop) {
    const int32_t out = Mod(rank - hop, size);
    const int32_t in = Mod(rank - hop - 1, size);
    int32_t& sent = last[static_cast<size_t>(out)];
    sent = Add(schedule, hop == 0 ? SendInput(kReduceScatter, out, right)
                                  : SendOutput(kReduceScatter, out, right, /*after=*/sent));
    const bool finish = hop == size - 2;
    last[static_cast<size_t>(in)] =
        Add(schedule, hop == 0 ? ReduceInputs(kReduceScatter, in, {left}, finish)
                               : ReducePartialFrom(kReduceScatter, in, left, finish));
  }
  return last;
}

void AddAllgather(Schedule* schedule, int rank, int size, std::vector<int32_t> last) {
  const int32_t left = Mod(rank - 1, size);
  const int32_t right = Mod(rank + 1, size);
  for (int hop = 0; hop < size - 1; ++hop) {
    const int32_t out = Mod(rank + 1 - hop, size);
    const int32_t in = Mod(rank - hop, size);
    Add(schedule, SendOutput(kAllgather, out, right, last[static_cast<size_t>(out)]));
    int32_t& copied = last[static_cast<size_t>(in)];
    copied = Add(schedule, CopyFrom(kAllgather, in, left, /*after=*/copied));
  }
}

Schedule Make(const ScheduleArgs& args) {
  const int rank = args.rank;
  const int size = args.size;
  Schedule schedule;
  if (size == 1) {
    Add(&schedule, Local(0));
    return schedule;
  }
  AddAllgather(&schedule, rank, size, AddReduceScatter(&schedule, rank, size));
  return schedule;
}

}  // namespace

AlgorithmEntry RingAllreduce() { return {"ring", CollectiveKind::kAllreduce, Supports, Make}; }

}  // namespace tfdist
