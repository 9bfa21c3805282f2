// Short forms for the steps of a schedule, shared by the algorithms.
#ifndef TFDIST_OPS_COLLECTIVE_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_STEPS_H_

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "collective/schedule.h"

namespace tfdist {

// (value mod size) in [0, size), for values down to -size.
inline int32_t Mod(int value, int size) { return (value + size) % size; }

// All ranks but `rank`, ascending.
inline std::vector<int32_t> Others(int rank, int size) {
  std::vector<int32_t> others;
  for (int32_t peer = 0; peer < size; ++peer) {
    if (peer != rank) others.push_back(peer);
  }
  return others;
}

// Appends `step`; returns its index, for `after` of later ones.
inline int32_t Add(Schedule* schedule, Step step) {
  schedule->steps.push_back(std::move(step));
  return static_cast<int32_t>(schedule->steps.size()) - 1;
}

// The steps that a step comes after: none, an index (-1: none), or several.
class After {
 public:
  After() = default;
  After(int32_t step) { And(step); }  // NOLINT: an index is what is meant
  After(std::initializer_list<int32_t> steps) {
    for (int32_t step : steps) And(step);
  }
  void And(int32_t step) {
    if (step >= 0) steps_.push_back(step);
  }
  const std::vector<int32_t>& steps() const { return steps_; }

 private:
  std::vector<int32_t> steps_;
};

// ---- Sending.

inline Step SendFrom(Place own, uint16_t phase, int32_t slice, int32_t peer, const After& after) {
  Step step;
  step.kind = StepKind::kSend;
  step.phase = phase;
  step.slice = slice;
  step.peers = {peer};
  step.own = own;
  step.after = after.steps();
  return step;
}
// Sends this rank's input: nothing to wait for.
inline Step SendInput(uint16_t phase, int32_t slice, int32_t peer) {
  return SendFrom(Place::kInput, phase, slice, peer, {});
}
// Sends what the steps of `after` have written.
inline Step SendOutput(uint16_t phase, int32_t slice, int32_t peer, const After& after) {
  return SendFrom(Place::kOutput, phase, slice, peer, after);
}
inline Step SendPartial(uint16_t phase, int32_t slice, int32_t peer, const After& after) {
  return SendFrom(Place::kPartial, phase, slice, peer, after);
}
inline Step SendHeld(uint16_t phase, int32_t slice, int32_t peer, const After& after) {
  return SendFrom(Place::kHeld, phase, slice, peer, after);
}

// ---- Receiving.

// Receives into the output; `after`: the last step that reads what is overwritten.
inline Step CopyFrom(uint16_t phase, int32_t slice, int32_t peer, const After& after) {
  Step step = SendFrom(Place::kInput, phase, slice, peer, after);
  step.kind = StepKind::kCopy;
  return step;
}
// Receives what is to be sent on.
inline Step HoldFrom(uint16_t phase, int32_t slice, int32_t peer) {
  Step step = CopyFrom(phase, slice, peer, {});
  step.to = Place::kHeld;
  return step;
}
// The output gets this rank's input, bit for bit.
inline Step LocalCopy(int32_t slice) {
  Step step = CopyFrom(0, slice, 0, {});
  step.peers.clear();
  return step;
}

// ---- Reducing. The result goes to the output when it is finished, else to the partial.

// Reduces untouched inputs of `peers` (ascending) and of this rank, in rank order.
inline Step ReduceInputs(uint16_t phase, int32_t slice, std::vector<int32_t> peers, bool finish) {
  Step step;
  step.kind = StepKind::kReduce;
  step.phase = phase;
  step.slice = slice;
  step.peers = std::move(peers);
  step.raw = true;
  step.finish = finish;
  step.to = finish ? Place::kOutput : Place::kPartial;
  return step;
}
// Reduces the partial result of `peer` and this rank's input, in this order.
inline Step ReducePartialFrom(uint16_t phase, int32_t slice, int32_t peer, bool finish) {
  Step step = ReduceInputs(phase, slice, {peer}, finish);
  step.raw = false;
  return step;
}
// The output gets this rank's input, reduced with no other (but scaled).
inline Step Local(int32_t slice) { return ReduceInputs(0, slice, {}, /*finish=*/true); }

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_STEPS_H_
