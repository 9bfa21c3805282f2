// The algorithm table and its selection, what algorithms send, and the runner's own negative
// checks.
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "collective/schedule.h"
#include "planned.h"
#include "ranks.h"
#include "schedule_runner.h"

namespace tfdist {
namespace {

TEST(every_type_is_carried_and_every_reducible_one_reduced) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    for (DType dtype : AllTypes()) {
      // A torus of four, a set of two for send and receive.
      const int size = entry.kind == CollectiveKind::kSendRecv ? 2 : 4;
      const bool takes = !Reduces(entry.kind) || IsReducible(dtype);
      CHECK_EQ_IN(entry.supports({0, size, 0, {}}, dtype), takes, entry.name);
    }
    CHECK(!entry.supports({0, 2, 0, {}}, DType::kInvalid));
  }
}

TEST(a_torus_needs_a_grid_and_a_send_two_ranks) {
  const AlgorithmEntry* torus =
      FindAlgorithm(CollectiveKind::kAllreduce, "torus", {0, 4, 0, {}}, DType::kFloat32);
  CHECK(torus != nullptr);
  for (int size : {1, 2, 3, 5, 7, 13}) {
    CHECK_EQ(torus->supports({0, size, 0, {}}, DType::kFloat32), false);
  }
  for (int size : {4, 6, 8, 9, 15}) CHECK(torus->supports({0, size, 0, {}}, DType::kFloat32));
  CHECK(FindAlgorithm(CollectiveKind::kSendRecv, "auto", {0, 3, 0, {}}, DType::kInt8) == nullptr);
}

TEST(every_row_has_a_name_of_its_own) {
  std::set<std::string> names;
  for (const AlgorithmEntry& entry : Algorithms()) {
    CHECK(names.insert(std::string(CollectiveKindName(entry.kind)) + "/" + entry.name).second);
  }
}

TEST(frames_are_cut_at_multiples_of_64_bytes) {
  Schedule schedule;
  schedule.steps.resize(1);
  schedule.steps[0].peers = {1};
  CHECK_EQ(CountSends(schedule, {0}, DType::kInt8, 256).frames, 0u);
  CHECK_EQ(CountSends(schedule, {256}, DType::kInt8, 256).frames, 1u);
  CHECK_EQ(CountSends(schedule, {257}, DType::kInt8, 256).frames, 2u);
  CHECK_EQ(CountSends(schedule, {256}, DType::kInt8, 255).frames, 2u);  // as 192
  CHECK_EQ(CountSends(schedule, {65}, DType::kFloat32, 256).frames, 2u);
}

TEST(partial_results_of_half_types_count_as_float32) {
  Schedule schedule;
  schedule.steps.resize(2);
  schedule.steps[0].peers = {1};
  schedule.steps[1].peers = {1};
  schedule.steps[1].own = Place::kPartial;
  schedule.partials = true;
  CHECK_EQ(CountSends(schedule, {128}, DType::kFloat32, 256).bytes, 1024u);
  CHECK_EQ(CountSends(schedule, {128}, DType::kFloat16, 256).bytes, 256u + 512u);
  CHECK_EQ(CountSends(schedule, {128}, DType::kFloat16, 256).frames, 4u);  // of 64 elements
  schedule.partials = false;
  schedule.steps.resize(1);
  CHECK_EQ(CountSends(schedule, {128}, DType::kFloat16, 256).frames, 1u);
}

TEST(an_unknown_name_is_refused_with_the_known_ones) {
  Config config;
  CHECK_OK(CheckAlgorithmNames(config));
  config.allreduce_algorithm = "butterfly";
  CHECK_OK(CheckAlgorithmNames(config));
  config.gather_algorithm = "ring";
  const Status status = CheckAlgorithmNames(config);
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK_EQ(status.message(),
           "TFDIST_GATHER_ALGORITHM: expected one of auto, star, binomial; got \"ring\"");
  for (CollectiveKind kind :
       {CollectiveKind::kAllreduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllgather,
        CollectiveKind::kBroadcast, CollectiveKind::kReduce, CollectiveKind::kGather,
        CollectiveKind::kScatter, CollectiveKind::kAlltoall}) {
    Config wrong;
    AlgorithmEntry none = Algorithms()[0];
    none.kind = kind;
    none.name = "no such";
    SetAlgorithm(&wrong, none);
    CHECK(!CheckAlgorithmNames(wrong).ok());
  }
}

// ---- What the runner and the check must find wrong.

Step MakeStep(StepKind kind, int32_t slice, uint16_t phase, int32_t peer, int32_t after = -1) {
  Step step;
  step.kind = kind;
  step.slice = slice;
  step.phase = phase;
  step.peers = {peer};
  if (after >= 0) step.after = {after};
  step.own = kind == StepKind::kSend && after >= 0 ? Place::kOutput : Place::kInput;
  return step;
}

RunnerOptions Float32() {
  RunnerOptions options;
  options.reduction.dtype = DType::kFloat32;
  return options;
}

// Two ranks, one slice of 100 float32 in place.
std::string RunTwo(const std::vector<Step>& steps_a, const std::vector<Step>& steps_b) {
  Schedule a;
  Schedule b;
  a.steps = steps_a;
  b.steps = steps_b;
  static Bytes memory[2];
  std::vector<std::vector<Slice>> slices;
  for (Bytes& m : memory) {
    m.assign(400, 1);
    slices.push_back(CutWhole({{m.data(), m.data(), 100, 0}}, true));
  }
  return ScheduleRunner({a, b}, slices, Float32()).Run();
}

TEST(schedules_that_do_not_fit_are_found) {
  const Step send0 = MakeStep(StepKind::kSend, 0, 0, 1);
  const Step copy0 = MakeStep(StepKind::kCopy, 0, 0, 0);
  const Step later = MakeStep(StepKind::kSend, 0, 1, 1);
  const Step deaf = MakeStep(StepKind::kCopy, 0, 1, 0);
  CHECK_EQ(RunTwo({send0}, {copy0}), "");
  CHECK_EQ(RunTwo({send0, later}, {copy0}), "never received: rank 0 to 1, phase 1, slice 0");
  CHECK_EQ(RunTwo({send0}, {copy0, deaf}), "never sent: rank 0 to 1, phase 1, slice 0");
  CHECK_EQ(RunTwo({send0, send0}, {copy0}), "sent twice: rank 0 to 1, phase 0, slice 0");
  CHECK_EQ(RunTwo({send0}, {copy0, copy0}), "received twice: rank 0 to 1, phase 0, slice 0");
  CHECK_EQ(RunTwo({MakeStep(StepKind::kSend, 3, 0, 1)}, {copy0}), "rank 0 step 0: no such slice");
  CHECK_EQ(RunTwo({MakeStep(StepKind::kSend, 0, 0, 0)}, {copy0}), "rank 0 step 0: no such peer");
  CHECK_EQ(RunTwo({MakeStep(StepKind::kSend, 0, 0, 1, 0)}, {copy0}),
           "rank 0 step 0: after a later step");
}

TEST(a_deadlock_is_found) {
  // Each rank sends only after it has received.
  const std::string error =
      RunTwo({MakeStep(StepKind::kCopy, 0, 0, 1), MakeStep(StepKind::kSend, 0, 1, 1, 0)},
             {MakeStep(StepKind::kCopy, 0, 1, 0), MakeStep(StepKind::kSend, 0, 0, 0, 0)});
  CHECK_EQ(error.substr(0, 9), "deadlock:");
}

TEST(sending_what_a_rank_does_not_have_is_found) {
  Bytes memory[2] = {Bytes(400), Bytes(400)};
  std::vector<std::vector<Slice>> slices;
  for (Bytes& m : memory) slices.push_back(CutWhole({{nullptr, m.data(), 100, 0}}, false));
  const std::string error =
      ScheduleRunner({Schedule{{MakeStep(StepKind::kSend, 0, 0, 1)}, {}, false, false},
                      Schedule{{MakeStep(StepKind::kCopy, 0, 0, 0)}, {}, false, false}},
                     slices, Float32())
          .Run();
  CHECK_EQ(error, "rank 0 step 0 reads what the rank does not have");
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
