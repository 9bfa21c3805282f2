// Copies past the caches, and results that are written that way while they are sent.
#include "collective/streaming_copy.h"

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collective/reduce_kernels.h"
#include "collective/step_memory.h"
#include "planned.h"
#include "schedule_runner.h"

namespace tfdist {
namespace {

TEST(every_length_from_every_address_to_every_address) {
  std::mt19937_64 random(1);
  Bytes source(400);
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
  for (size_t bytes : {0, 1, 63, 64, 65, 127, 128, 200, 300}) {
    for (size_t from = 0; from < 65; from += 13) {
      for (size_t to = 0; to < 65; ++to) {
        Bytes target(500, kGuard);
        Bytes expected = target;
        std::copy_n(source.begin() + static_cast<int64_t>(from), bytes,
                    expected.begin() + static_cast<int64_t>(to));
        StreamingCopy(target.data() + to, source.data() + from, bytes);
        CHECK_EQ_IN(target == expected, true,
                    std::to_string(bytes) + " bytes, " + std::to_string(from) + " to " +
                        std::to_string(to));
      }
    }
  }
}

// The steps of rank 0 that send its inputs and reduce its part, as when its result is sent on the
// way, and that take the others; what comes, the output or what is sent goes past the caches, or
// any of them together.
void ExpectSameBits(const char* algorithm, int size, DType dtype, bool in_place) {
  Setting s;
  s.entry = FindAlgorithm(CollectiveKind::kAllreduce, algorithm, {0, size, 0, {}}, dtype);
  s.size = size;
  s.dtype = dtype;
  s.op = ReduceOp::kAverage;
  s.lengths = {50000, 301};
  s.in_place = in_place;
  s.segment_bytes = 40960;
  constexpr int kWays = 8;
  Bytes outputs[kWays];
  Bytes sent[kWays];
  for (int streamed = 0; streamed < kWays; ++streamed) {
    const bool streams_output = streamed % 2 == 1;
    const bool streams_sent = streamed / 2 % 2 == 1;
    const bool streamed_wire = streamed / 4 == 1;
    Planned planned(s);
    const Plan& plan = planned.plan(0);
    Reduction reduction;
    reduction.dtype = dtype;
    reduction.op = s.op;
    reduction.finish = {size, 1.0};
    StepMemory memory(plan.schedule, plan.slices, reduction, 0, s.segment_bytes,
                      streams_output ? 0 : kNeverStreamed);
    for (size_t step = 0; step < memory.steps().size(); ++step) {
      const bool sends = memory.steps()[step].kind == StepKind::kSend;
      const bool reduces = memory.steps()[step].finish;
      for (int64_t segment = 0; segment < memory.segments(step); ++segment) {
        Bytes wire(memory.WireBytes(step, segment));
        // Numbers of every type that change a sum.
        for (size_t i = 0; i < wire.size(); ++i) wire[i] = static_cast<uint8_t>(i % 67);
        Bytes also(sends || reduces ? wire.size() : 0, kGuard);
        if (sends) {
          memory.Pack(step, segment, also.data(), streams_sent);
        } else {
          memory.Take(step, segment, {wire.data()}, streamed_wire, reduces ? also.data() : nullptr,
                      reduces && streams_sent);
        }
        sent[streamed].insert(sent[streamed].end(), also.begin(), also.end());
      }
    }
    outputs[streamed] = planned.AllOutput(0);
  }
  CHECK(!sent[0].empty());
  for (int streamed = 1; streamed < kWays; ++streamed) {
    CHECK_EQ_IN(sent[0] == sent[streamed], true, DTypeName(dtype));
    CHECK_EQ_IN(outputs[0] == outputs[streamed], true, DTypeName(dtype));
  }
}

TEST(a_result_that_is_sent_has_the_same_bits_in_both_places) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt8, DType::kComplex64}) {
    for (bool in_place : {false, true}) {
      ExpectSameBits("pairwise", 2, dtype, in_place);
      ExpectSameBits("ring", 3, dtype, in_place);  // partial results come
    }
  }
}

// Not what passes through a rank, nor what it sends: a scatter of 64 MiB to 8 ranks leaves 8 MiB on
// each, which whoever reads them next can find in a cache.
TEST(the_bound_is_of_what_a_rank_gets) {
  for (CollectiveKind kind : {CollectiveKind::kScatter, CollectiveKind::kAlltoall,
                              CollectiveKind::kAllgather, CollectiveKind::kBroadcast}) {
    int streaming = 0;
    for (const AlgorithmEntry& entry : Algorithms()) {
      if (entry.kind != kind || !entry.supports({0, 4, 0, {}}, DType::kFloat32)) continue;
      Setting s;
      s.entry = &entry;
      s.size = 4;
      s.lengths = {100};
      s.rows.assign(kind == CollectiveKind::kAlltoall ? 16 : 4, 0);
      std::iota(s.rows.begin(), s.rows.end(), 3);
      Planned planned(s);
      Reduction reduction;
      reduction.dtype = s.dtype;
      for (int rank = 0; rank < s.size; ++rank) {
        const Plan& plan = planned.plan(rank);
        const auto streams = [&](size_t bound, int64_t step_bytes = 0) {
          const StepMemory memory(plan.schedule, plan.slices, reduction, rank, s.segment_bytes,
                                  bound, step_bytes);
          for (size_t step = 0; step < memory.steps().size(); ++step) {
            if (memory.Streams(step, true)) return true;
          }
          return false;
        };
        const size_t bytes = planned.Output(rank, 0).size();
        streaming += streams(0);
        CHECK_EQ_IN(streams(bytes), streams(0), s.Name());
        CHECK_EQ_IN(streams(bytes + 1), false, s.Name());
        // Unless it comes together with others.
        const auto more = static_cast<int64_t>(bytes + 1);
        CHECK_EQ_IN(streams(bytes + 1, more), streams(0) && bytes > 0, s.Name());
      }
    }
    CHECK(streaming > 0);
  }
}

TEST(the_bound_is_the_caches_for_all_ranks_of_a_host) {
  constexpr int64_t kMiB = 1 << 20;
  CHECK_EQ(StreamedBytes(32 * kMiB, 2), size_t{16 * kMiB});
  CHECK_EQ(StreamedBytes(32 * kMiB, 4), size_t{8 * kMiB});
  CHECK_EQ(StreamedBytes(0, 4), size_t{16 * kMiB});
  CHECK_EQ(StreamedBytes(8 * kMiB, 1), size_t{8 * kMiB});
  CHECK_EQ(StreamedBytes(384 * kMiB, 1), size_t{64 * kMiB});
  CHECK_EQ(StreamedBytes(384 * kMiB, 48), size_t{8 * kMiB});
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
