// Schedules that move data without computing: every row of the algorithm table, all ranks in one
// thread in random order.
#include <vector>

#include "check.h"
#include "collective/reduce_kernels.h"
#include "collective/step_memory.h"
#include "schedule_runner.h"
#include "settings.h"

namespace tfdist {
namespace {

TEST(every_broadcast_from_every_root_of_every_type) {
  uint64_t seed = 0;
  for (CollectiveKind kind : {CollectiveKind::kBroadcast, CollectiveKind::kSendRecv}) {
    ForEachRow(kind, [&](Setting s) {
      for (DType dtype : AllTypes()) {
        for (s.root = 0; s.root < s.size; ++s.root) {
          ++seed;
          s.dtype = dtype;
          s.lengths = Lengths(s.size, dtype);
          s.in_place = seed % 2 == 0;
          s.seed = seed;
          s.read_late = seed % 3 == 0;
          Planned(s).Run().Expect();
        }
      }
    });
  }
}

// allgather, gather, scatter: rows by rank.
void ExpectRows(CollectiveKind kind, const std::vector<DType>& types,
                const std::vector<int64_t>& lengths) {
  uint64_t seed = 0;
  ForEachRow(kind, [&](Setting s) {
    for (DType dtype : types) {
      for (int64_t n : lengths) {
        for (s.root = 0; s.root < (HasRoot(kind) ? s.size : 1); s.root += 1 + s.size / 3) {
          ++seed;
          s.dtype = dtype;
          s.rows = RaggedRows(s.size, n, static_cast<int>(seed % 3));
          s.in_place = seed / 3 % 2 == 0;
          s.seed = seed;
          s.read_late = seed % 5 < 2;
          Planned(s).Run().Expect();
        }
      }
    }
  });
}

TEST(every_allgather_of_every_type_and_length) {
  ExpectRows(CollectiveKind::kAllgather, AllTypes(), {0, 1, 29});
  ExpectRows(CollectiveKind::kAllgather, {DType::kFloat32, DType::kFloat16},
             Lengths(5, DType::kInt8));
}

TEST(every_gather_of_every_type_and_length) {
  ExpectRows(CollectiveKind::kGather, AllTypes(), {0, 1, 29});
  ExpectRows(CollectiveKind::kGather, {DType::kFloat32, DType::kFloat16}, Lengths(5, DType::kInt8));
}

TEST(every_scatter_of_every_type_and_length) {
  ExpectRows(CollectiveKind::kScatter, AllTypes(), {0, 1, 29});
  ExpectRows(CollectiveKind::kScatter, {DType::kFloat32, DType::kFloat16},
             Lengths(5, DType::kInt8));
}

TEST(every_alltoall_of_every_type_and_split) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kAlltoall, [&](Setting s) {
    for (DType dtype : AllTypes()) {
      for (int64_t n : {0, 1, 5, 90}) {
        ++seed;
        s.dtype = dtype;
        s.rows.clear();
        for (int from = 0; from < s.size; ++from) {
          for (int to = 0; to < s.size; ++to) {
            s.rows.push_back(n == 5 ? n : n * ((from * 3 + to * 5 + n) % 4) / 3);
          }
        }
        s.seed = seed;
        s.read_late = seed % 3 == 0;
        Planned(s).Run().Expect();
      }
    }
  });
}

// Slices that only pass through a rank lie in memory that is allocated for them alone.
TEST(held_slices_are_those_of_the_ranks_below) {
  Setting s;
  s.entry = FindAlgorithm(CollectiveKind::kGather, "binomial", {0, 8, 0, {}}, DType::kInt8);
  s.size = 8;
  s.dtype = DType::kInt8;
  s.rows = RaggedRows(8, 10, 0);
  Planned planned(s);
  for (int rank = 0; rank < 8; ++rank) {
    const Plan& plan = planned.plan(rank);
    Reduction reduction;
    reduction.dtype = s.dtype;
    const StepMemory memory(plan.schedule, plan.slices, reduction, rank, 256, kNeverStreamed);
    const size_t below[] = {0, 0, 1, 0, 3, 0, 1, 0};
    CHECK_EQ(memory.scratch_bytes(), below[rank] * 10 * static_cast<size_t>(kRowWidth));
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
