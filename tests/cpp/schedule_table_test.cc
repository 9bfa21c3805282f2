// The algorithm table and its selection, what algorithms send, and the runner's own negative
// checks.
#include <string>
#include <vector>

#include "check.h"
#include "collective/schedule.h"
#include "schedule_runner.h"

namespace tfdist {
namespace {

using Bytes = std::vector<uint8_t>;

TEST(types_without_arithmetic_are_carried_as_bytes) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    const bool carries = entry.kind != CollectiveKind::kAllreduce;
    for (DType dtype : {DType::kBool, DType::kUint8, DType::kComplex128}) {
      CHECK_EQ_IN(entry.supports({0, 2, 0, {}}, dtype), carries, entry.name);
    }
    CHECK(!entry.supports({0, 2, 0, {}}, DType::kInvalid));
  }
}

TEST(bytes_on_the_wire_are_those_of_the_headers) {
  for (uint64_t n : {1, 2, 3, 4, 7, 8}) {
    const int size = static_cast<int>(n);
    const std::vector<uint64_t> even(n, 1000);
    uint64_t broadcast = 0;
    for (const AlgorithmEntry& entry : Algorithms()) {
      const std::string name = entry.name;
      for (int rank = 0; rank < size; ++rank) {
        const SendCount c = CountSends(entry.make({rank, size, size / 2, {}}), even, 640);
        const std::string where = name + " rank " + std::to_string(rank);
        if (entry.kind == CollectiveKind::kAllreduce && (name == "ring" || name == "pairwise")) {
          CHECK_EQ_IN(c.bytes, 2 * (n - 1) * 1000, where);  // 2 (n - 1) / n of n * 1000
          CHECK_EQ_IN(c.frames, 2 * (n - 1) * 2, where);
        }
        if (name == "ring" && entry.kind == CollectiveKind::kAllgather) {
          CHECK_EQ_IN(c.bytes, (n - 1) * 1000, where);
        }
        if (name == "binomial") {
          broadcast += c.bytes;
          const uint64_t levels = n == 1 ? 0 : n == 2 ? 1 : n <= 4 ? 2 : 3;
          if (rank == size / 2) CHECK_EQ_IN(c.bytes, levels * 1000, where);
        }
      }
    }
    CHECK_EQ(broadcast, (n - 1) * 1000);
  }
}

TEST(frames_are_cut_at_multiples_of_64_bytes) {
  Schedule schedule;
  schedule.steps.resize(1);
  schedule.steps[0].peers = {1};
  CHECK_EQ(CountSends(schedule, {0}, 256).frames, 0u);
  CHECK_EQ(CountSends(schedule, {256}, 256).frames, 1u);
  CHECK_EQ(CountSends(schedule, {257}, 256).frames, 2u);
  CHECK_EQ(CountSends(schedule, {256}, 255).frames, 2u);  // as 192
}

std::string Selected(CollectiveKind kind, const std::string& wanted, DType dtype, bool all_local) {
  const std::vector<int32_t> hosts =
      all_local ? std::vector<int32_t>(4, 3) : std::vector<int32_t>{0, 1, 2, 3};
  const AlgorithmEntry* entry = SelectAlgorithm(kind, wanted, {0, 4, 0, hosts}, dtype);
  return entry != nullptr ? entry->name : "none";
}

TEST(selection_follows_type_and_topology) {
  constexpr CollectiveKind kSum = CollectiveKind::kAllreduce;
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, false), "ring");
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, true), "pairwise");
  CHECK_EQ(Selected(kSum, "auto", DType::kBfloat16, false), "pairwise");
  CHECK_EQ(Selected(kSum, "ring", DType::kInt64, true), "ring");
  CHECK_EQ(Selected(kSum, "pairwise", DType::kFloat64, false), "pairwise");
  CHECK_EQ(Selected(kSum, "ring", DType::kFloat16, false), "none");
  CHECK_EQ(Selected(kSum, "auto", DType::kBool, true), "none");
  CHECK_EQ(Selected(kSum, "binomial", DType::kFloat32, false), "none");
  CHECK_EQ(Selected(kSum, "", DType::kFloat32, false), "none");
  CHECK_EQ(Selected(CollectiveKind::kAllgather, "auto", DType::kBool, true), "ring");
  CHECK_EQ(Selected(CollectiveKind::kBroadcast, "auto", DType::kComplex128, false), "binomial");
  CHECK_EQ(Selected(CollectiveKind::kBarrier, "auto", DType::kFloat32, false), "none");
  CHECK_EQ(std::string(CollectiveKindName(CollectiveKind::kRegister)), "register");
}

// ---- What the runner and the check must find wrong.

Step MakeStep(StepKind kind, int32_t slice, uint16_t phase, int32_t peer, int32_t after = -1) {
  Step step;
  step.kind = kind;
  step.slice = slice;
  step.phase = phase;
  step.peers = {peer};
  step.after = after;
  step.from_input = kind == StepKind::kSend && after < 0;
  return step;
}

// Two ranks, one slice of 100 float32 in place.
std::string RunTwo(const Schedule& a, const Schedule& b) {
  static Bytes memory[2];
  std::vector<std::vector<Slice>> slices;
  for (Bytes& m : memory) {
    m.assign(400, 1);
    slices.push_back(CutBroadcast({{m.data(), m.data(), 100, 0}}, true));
  }
  return ScheduleRunner({a, b}, slices, RunnerOptions{}).Run();
}

TEST(schedules_that_do_not_fit_are_found) {
  const Step send0 = MakeStep(StepKind::kSend, 0, 0, 1);
  const Step copy0 = MakeStep(StepKind::kCopy, 0, 0, 0);
  const Step later = MakeStep(StepKind::kSend, 0, 1, 1);
  const Step deaf = MakeStep(StepKind::kCopy, 0, 1, 0);
  CHECK_EQ(RunTwo({{send0}}, {{copy0}}), "");
  CHECK_EQ(RunTwo({{send0, later}}, {{copy0}}), "never received: rank 0 to 1, phase 1, slice 0");
  CHECK_EQ(RunTwo({{send0}}, {{copy0, deaf}}), "never sent: rank 0 to 1, phase 1, slice 0");
  CHECK_EQ(RunTwo({{send0, send0}}, {{copy0}}), "sent twice: rank 0 to 1, phase 0, slice 0");
  CHECK_EQ(RunTwo({{send0}}, {{copy0, copy0}}), "received twice: rank 0 to 1, phase 0, slice 0");
  CHECK_EQ(RunTwo({{MakeStep(StepKind::kSend, 3, 0, 1)}}, {{copy0}}),
           "rank 0 step 0: no such slice");
  CHECK_EQ(RunTwo({{MakeStep(StepKind::kSend, 0, 0, 0)}}, {{copy0}}),
           "rank 0 step 0: no such peer");
  CHECK_EQ(RunTwo({{MakeStep(StepKind::kSend, 0, 0, 1, 0)}}, {{copy0}}),
           "rank 0 step 0: after a later step");
}

TEST(a_deadlock_is_found) {
  // Each rank sends only after it has received.
  const std::string error =
      RunTwo({{MakeStep(StepKind::kCopy, 0, 0, 1), MakeStep(StepKind::kSend, 0, 1, 1, 0)}},
             {{MakeStep(StepKind::kCopy, 0, 1, 0), MakeStep(StepKind::kSend, 0, 0, 0, 0)}});
  CHECK_EQ(error.substr(0, 9), "deadlock:");
}

TEST(sending_what_a_rank_does_not_have_is_found) {
  Bytes memory[2] = {Bytes(400), Bytes(400)};
  std::vector<std::vector<Slice>> slices;
  for (Bytes& m : memory) slices.push_back(CutBroadcast({{nullptr, m.data(), 100, 0}}, false));
  const std::string error = ScheduleRunner({Schedule{{MakeStep(StepKind::kSend, 0, 0, 1)}},
                                            Schedule{{MakeStep(StepKind::kCopy, 0, 0, 0)}}},
                                           slices, RunnerOptions{})
                                .Run();
  CHECK_EQ(error, "rank 0 sends what it does not have");
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
