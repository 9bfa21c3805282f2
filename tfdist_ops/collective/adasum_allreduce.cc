// allreduce by Adasum: halving and doubling as in halving_doubling_allreduce.cc, with the rule of
// adasum.h instead of an addition.
//
//   The own input, scaled, becomes the partial result. Then for each bit of the rank, from the
//   lowest on, two blocks of ranks that differ in it become one:
//     exchange    the partner in the other block gets one half of what the rank has, and gives its
//                 part of the other half
//     dots        of its own part and the partner's, for each tensor
//     sum         of the dots over the ranks of both blocks, which have the other parts of the same
//                 two vectors: a butterfly over these ranks
//     combine     its own part with the partner's, by the factors that follow from the dots
//   In the end each rank owns one slice, finishes it, and the halving runs backwards.
//
// Ranks: powers of two. On the wire per rank: as halving_doubling, and 24 bytes a tensor in each of
// log2 size (log2 size + 1) / 2 messages. Partial results of half types travel as float32, also the
// first ones.
//
// Bits: both ranks of a pair add the same two numbers, and each slice is combined by one rank. How
// a tensor is cut depends only on its length and hint, so fusion does not change its result.
//
// In place (input == output): as in halving_doubling.
#include "collective/adasum.h"
#include "collective/fold_steps.h"
#include "collective/halving_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

// kExchange + 2 k: the exchange of level k, + 1: its way back; kSum + k: the sum of its dots.
enum Phase : uint16_t { kExchange = 0, kSum = 128 };

bool Supports(const ScheduleArgs& args, DType dtype) {
  return IsFloating(dtype) && HighestPowerOfTwo(args.size) == args.size;
}

// Sums the dots over the ranks that differ in bits up to `bit`. Returns the last step.
int32_t AddSumOfDots(Schedule* schedule, int rank, int bit, int32_t slice, uint16_t phase,
                     int32_t dots) {
  int32_t last = dots;
  for (int other = 1; other <= bit; other <<= 1) {
    const int32_t peer = rank ^ other;
    Step send = SendFrom(Place::kDots, phase, slice, peer, last);
    Step sum = ReduceInputs(phase, slice, {peer}, /*finish=*/false);
    send.label = sum.label = 0;
    sum.own = sum.to = Place::kDots;
    const int32_t sent = Add(schedule, send);
    sum.after = After({last, sent}).steps();
    last = Add(schedule, sum);
  }
  return last;
}

// One level: both blocks become one. Returns the exchange; *last becomes the step that combines
// this rank's part.
HalvingExchange AddLevel(Schedule* schedule, const ScheduleArgs& args, int level, int32_t* begin,
                         int32_t* last) {
  const int bit = 1 << level;
  const int32_t half = args.size / bit / 2;
  const bool second = (args.rank & bit) != 0;
  const int32_t upper = *begin + half;
  HalvingExchange e{static_cast<uint16_t>(kExchange + 2 * level), args.rank ^ bit, 0, 0, -1};
  e.kept = JoinSlices(schedule, args.size, second ? upper : *begin, half);
  e.given = JoinSlices(schedule, args.size, second ? *begin : upper, half);
  if (second) *begin = upper;
  Step send = SendPartial(e.phase, e.given, e.peer, *last);
  Step receive = CopyFrom(e.phase, e.kept, e.peer, *last);
  send.label = receive.label = 0;
  receive.to = Place::kBeside;
  e.sent = Add(schedule, send);
  const int32_t received = Add(schedule, receive);
  Step dots;
  dots.kind = StepKind::kDots;
  dots.slice = e.kept;
  dots.own = Place::kPartial;
  dots.to = Place::kDots;
  dots.second = second;
  dots.after = After({*last, received}).steps();
  const int32_t own = Add(schedule, dots);
  Step combine = dots;
  combine.kind = StepKind::kCombine;
  combine.to = Place::kPartial;
  combine.after = {
      AddSumOfDots(schedule, args.rank, bit, e.kept, static_cast<uint16_t>(kSum + level), own)};
  *last = Add(schedule, combine);
  return e;
}

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.size == 1) {
    Add(&schedule, Local(0));
    return schedule;
  }
  schedule.partials = true;
  Step scale =
      ReduceInputs(0, JoinSlices(&schedule, args.size, 0, args.size), {}, /*finish=*/false);
  int32_t last = Add(&schedule, scale);
  int32_t begin = 0;
  std::vector<HalvingExchange> exchanges;
  for (int level = 0; 1 << level < args.size; ++level) {
    exchanges.push_back(AddLevel(&schedule, args, level, &begin, &last));
  }
  Step finish = ReduceInputs(0, begin, {}, /*finish=*/true);
  finish.own = Place::kPartial;
  finish.after = {last};
  AddDoubling(&schedule, exchanges, Add(&schedule, finish));
  return schedule;
}

}  // namespace

const AlgorithmEntry& AdasumAllreduce() {
  static const AlgorithmEntry entry{"adasum", CollectiveKind::kAllreduce, Supports, Make};
  return entry;
}

}  // namespace tfdist
