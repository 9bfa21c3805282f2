// Short forms for the steps of a schedule, shared by the algorithms.
#ifndef TFDIST_OPS_COLLECTIVE_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_STEPS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "collective/schedule.h"

namespace tfdist {

// (value mod size) in [0, size), for values down to -size.
inline int32_t Mod(int value, int size) { return (value + size) % size; }

// Appends `step`; returns its index, for `after` of later ones.
inline int32_t Add(Schedule* schedule, Step step) {
  schedule->steps.push_back(std::move(step));
  return static_cast<int32_t>(schedule->steps.size()) - 1;
}

// Sends the own input: nothing to wait for.
inline Step SendInput(uint16_t phase, int32_t slice, int32_t peer) {
  Step step;
  step.kind = StepKind::kSend;
  step.phase = phase;
  step.slice = slice;
  step.peers = {peer};
  step.from_input = true;
  return step;
}

// Sends the output, which step `after` has written.
inline Step SendOutput(uint16_t phase, int32_t slice, int32_t peer, int32_t after) {
  Step step = SendInput(phase, slice, peer);
  step.from_input = false;
  step.after = after;
  return step;
}

// Receives into the output; `after`: the last step that reads what is overwritten, or -1.
inline Step CopyFrom(uint16_t phase, int32_t slice, int32_t peer, int32_t after) {
  Step step;
  step.kind = StepKind::kCopy;
  step.phase = phase;
  step.slice = slice;
  step.peers = {peer};
  step.after = after;
  return step;
}

// Adds untouched inputs of `peers` (ascending) and the own one in rank order.
inline Step ReduceInputs(uint16_t phase, int32_t slice, std::vector<int32_t> peers, bool finish) {
  Step step;
  step.kind = StepKind::kReduce;
  step.phase = phase;
  step.slice = slice;
  step.peers = std::move(peers);
  step.raw = true;
  step.finish = finish;
  return step;
}

// Adds the own input to the partial result of `peer`.
inline Step ReducePartialFrom(uint16_t phase, int32_t slice, int32_t peer, bool finish) {
  Step step = ReduceInputs(phase, slice, {peer}, finish);
  step.raw = false;
  return step;
}

// The output gets the own input (an allreduce of one rank also scales it).
inline Step Local(int32_t slice) { return ReduceInputs(0, slice, {}, /*finish=*/true); }

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_STEPS_H_
