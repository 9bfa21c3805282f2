// Schedules that reduce: every row of the algorithm table, all ranks in one thread in random order.
#include "check.h"
#include "settings.h"

namespace tfdist {
namespace {

// Kinds with one slice or more over whole tensors: several tensors at once, of all lengths. Every
// third cell, another third with the next size; with --full all.
void ExpectAllCells(CollectiveKind kind) {
  uint64_t seed = 0;
  size_t setting = 0;
  ForEachRow(kind, [&](Setting s) {
    size_t number = setting++;
    // Types and topologies have nothing to do with each other: few cells on most of the latter.
    const bool all = s.host_of.empty() || s.host_of == Topologies(s.size)[3];
    for (const Cell& cell : AllCells()) {
      if (++number % 3 != 0 && !check::Full()) continue;
      if (!all && cell.dtype != DType::kBfloat16 && cell.dtype != DType::kInt32) continue;
      if (!s.entry->supports({0, s.size, 0, s.host_of}, cell.dtype)) continue;
      ++seed;
      s.dtype = cell.dtype;
      s.op = cell.op;
      s.lengths = Lengths(s.size, s.dtype);
      s.hints.clear();
      for (size_t t = 0; t < s.lengths.size(); ++t) s.hints.push_back(seed + 3 * t);
      s.root = HasRoot(kind) ? static_cast<int>(seed) % s.size : 0;
      s.seed = seed;
      s.in_place = seed % 2 == 0;
      s.read_late = seed % 3 == 0;
      Planned(s).Run().Expect();
    }
  });
}

TEST(every_allreduce_of_every_type_and_operation) {
  Planned::streamed = 0;
  ExpectAllCells(CollectiveKind::kAllreduce);
  CHECK(Planned::streamed > 0);
}

TEST(every_reduce_of_every_type_and_operation) {
  Planned::streamed = 0;
  ExpectAllCells(CollectiveKind::kReduce);
  CHECK(Planned::streamed > 0);
}

// Alone, because a slice without elements in one tensor has some in another one of a bucket.
TEST(every_allreduce_of_every_length_alone) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kAllreduce, [&](Setting s) {
    for (DType dtype : {DType::kFloat32, DType::kBfloat16}) {
      s.dtype = dtype;
      for (int64_t n : Lengths(s.size, s.dtype)) {
        for (bool in_place : {false, true}) {
          ++seed;
          s.lengths = {n};
          s.hints = {seed};  // the small ones wander over the slices
          s.in_place = in_place;
          s.seed = seed;
          s.read_late = seed % 3 == 0;
          Planned(s).Run().Expect();
        }
      }
    }
  });
}

TEST(every_reduce_to_every_root) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kReduce, [&](Setting s) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
      s.dtype = dtype;
      for (s.root = 0; s.root < s.size; ++s.root) {
        for (bool in_place : {false, true}) {
          s.lengths = {130, 0, 1};
          s.in_place = in_place;
          s.seed = ++seed;
          s.read_late = seed % 3 == 0;
          Planned(s).Run().Expect();
        }
      }
    }
  });
}

TEST(every_reduce_scatter_of_every_type_and_operation) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kReduceScatter, [&](Setting s) {
    for (const Cell& cell : AllCells()) {
      ++seed;
      s.dtype = cell.dtype;
      s.op = cell.op;
      s.rows = RaggedRows(s.size, static_cast<int64_t>(seed * 7 % 90), static_cast<int>(seed % 3));
      s.seed = seed;
      s.in_place = seed % 2 == 0;
      s.read_late = seed % 3 != 0;
      Planned(s).Run().Expect();
    }
  });
}

TEST(every_reduce_scatter_of_every_length) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kReduceScatter, [&](Setting s) {
    for (int64_t n : Lengths(s.size, s.dtype)) {
      for (int pattern : {0, 1, 2}) {
        for (bool in_place : {false, true}) {
          s.rows = RaggedRows(s.size, n, pattern);
          s.in_place = in_place;
          s.seed = ++seed;
          s.read_late = seed % 3 == 0;
          Planned(s).Run().Expect();
        }
      }
    }
  });
}

TEST(prescale_and_finish_reach_every_contribution_once) {
  for (CollectiveKind kind : {CollectiveKind::kAllreduce, CollectiveKind::kReduceScatter}) {
    ForEachRow(kind, [&](Setting s) {
      for (const Cell& cell : AllCells()) {
        if (!TakesScale(cell.dtype) || cell.op == ReduceOp::kProduct) continue;
        s.dtype = cell.dtype;
        s.op = cell.op;
        s.lengths = {300, 3};
        s.rows = RaggedRows(s.size, 40, 1);
        s.prescale = -0.5;  // turns minimum into maximum where it is forgotten
        s.postscale = 4.0;
        Planned(s).Run().Expect();
      }
    });
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
