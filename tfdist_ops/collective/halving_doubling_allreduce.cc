// allreduce "halving_doubling" (Rabenseifner): reduce-scatter by halving the data and doubling the
// distance, then the same steps backwards as an all-gather.
//
//   four ranks, slices 0 1 2 3          keeps (of what it has)     gives to its partner
//   step 0, partner differs in bit 0:   0, 2: 01   1, 3: 23        0, 2: 23   1, 3: 01
//   step 1, partner differs in bit 1:   0: 0  2: 1  1: 2  3: 3     0: 1  2: 0  1: 3  3: 2
//   Then rank 0 owns slice 0, rank 2 slice 1, rank 1 slice 2, rank 3 slice 3 (bits reversed),
//   divides and scales it. Backwards, each step gives the partner what the rank has and gets as
//   much.
//
// Steps: 2 log2 size, with one message each: what is kept or given is a joined slice. On the wire
// per rank: 2 (size - 1) / size of the data, the least that any allreduce can send. Numbers of
// ranks that are not powers of two are folded (fold_steps.h): two more steps, and the data once
// more each way for the folded ranks. A step waits for the whole of the one before: halves do not
// line up with segments.
//
// Order of additions: as butterfly, (x0 op x1) op (x2 op x3), the pairs that are folded together
// first; every slice is computed by one rank. Partial results of half types travel as float32 and
// the owner of a slice rounds once.
//
// In place (input == output): a step reduces into what is kept and sends what is given, which are
// disjoint; what is given is not written before the all-gather copies the result over it. That
// comes `after` the send. (It could not come earlier in any case: the result contains what was
// given.)
//
// Source: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004;
// R. Thakur, R. Rabenseifner, W. Gropp 2005 (fold_steps.h), on allreduce.
#include "collective/fold_steps.h"
#include "collective/halving_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

// kExchange + 2 k: the exchange of step k; + 1: its way back.
enum Phase : uint16_t { kFold = 0, kUnfold = 1, kExchange = 2 };

int Parts(const ScheduleArgs& args) { return HighestPowerOfTwo(args.size); }

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

// Halving. Returns the exchanges; *last is the step that reduced what is kept in the end.
std::vector<HalvingExchange> AddHalving(Schedule* schedule, const Fold& fold, int32_t* last) {
  const int v = fold.virtual_rank();
  std::vector<HalvingExchange> exchanges;
  int32_t begin = 0;
  uint16_t phase = kExchange;
  for (int bit = 1; bit < fold.power; bit <<= 1, phase = static_cast<uint16_t>(phase + 2)) {
    const int32_t half = fold.power / bit / 2;
    const bool upper = (v & bit) != 0;
    HalvingExchange e{phase, fold.RankOf(v ^ bit), 0, 0, -1};
    e.kept = JoinSlices(schedule, fold.power, upper ? begin + half : begin, half);
    e.given = JoinSlices(schedule, fold.power, upper ? begin : begin + half, half);
    if (upper) begin += half;
    const Place own = *last < 0 ? Place::kInput : Place::kPartial;
    e.sent = Add(schedule, SendFrom(own, phase, e.given, e.peer, *last));
    Step step = ReduceInputs(phase, e.kept, {e.peer}, /*finish=*/half == 1);
    step.raw = bit == 1 && !fold.StandsForTwo(v ^ bit);
    step.own = own;
    step.after = After(*last).steps();
    step.label = 0;
    schedule->steps[static_cast<size_t>(e.sent)].label = 0;
    *last = Add(schedule, step);
    exchanges.push_back(e);
  }
  return exchanges;
}

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  const Fold fold(args.rank, args.size);
  if (args.size == 1) {
    Add(&schedule, Local(0));
    return schedule;
  }
  const int32_t all = JoinSlices(&schedule, fold.power, 0, fold.power);
  if (fold.out()) {
    AddFoldedOut(&schedule, fold, kFold, kUnfold, all);
    return schedule;
  }
  const bool two = fold.StandsForTwo(fold.virtual_rank());
  int32_t last = -1;
  if (two) last = Add(&schedule, ReduceInputs(kFold, all, {args.rank - 1}, /*finish=*/false));
  const std::vector<HalvingExchange> exchanges = AddHalving(&schedule, fold, &last);
  const After have = AddDoubling(&schedule, exchanges, last);
  if (two) Add(&schedule, SendOutput(kUnfold, all, args.rank - 1, have));
  return schedule;
}

}  // namespace

AlgorithmEntry HalvingDoublingAllreduce() {
  return {"halving_doubling", CollectiveKind::kAllreduce, Supports, Make, Parts};
}

}  // namespace tfdist
