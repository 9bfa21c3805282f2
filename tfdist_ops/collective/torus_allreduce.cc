// allreduce "torus": ranks as a grid of X columns and Y rows, with rings along rows and columns:
// reduce-scatter along the row, allreduce along the column of the part that each rank then has,
// all-gather along the row. The ranks fill the grid row by row in the order of ring_order.h, so
// that rows lie inside hosts, if they fit.
//
//   2 x 3:   0 --- 1      X = 2: after 1 hop along its row a rank has half of the data of its row,
//            |     |      Y = 3: 2 + 2 hops along its column finish that half (in three slices),
//            2 --- 3             1 hop along the row gives it back.
//            |     |
//            4 --- 5
//
// The grid is the most square one; a prime number of ranks has none and is not supported.
//
// Steps: 2 (X - 1) + 2 (Y - 1), where a ring has 2 (X Y - 1); a hop along a row is one message of a
// joined slice. On the wire per rank: 2 (size - 1) / size of the data, as the ring. A column's ring
// waits until its part is complete in the row.
//
// Order of additions: as the ring's in each row, then as the ring's over the rows' results. Partial
// results of half types travel as float32; the rank that finishes a slice rounds once.
//
// In place (input == output): as ring_allreduce.cc, along rows and along columns. Along columns the
// partial of a slice is what a rank's own row reduced; the all-gather's copy of the slice comes
// `after` the send of that partial.
//
// Source: H. Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash",
// 2018, section on 2D-torus all-reduce (arXiv:1811.05233).
#include "collective/ring_steps.h"
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kRowReduce = 0, kColumnReduce = 1, kColumnGather = 2, kRowGather = 3 };

// Columns of the most square grid: the largest divisor up to the square root; 1 for a prime.
int Columns(int size) {
  int columns = 1;
  for (int d = 2; d * d <= size; ++d) {
    if (size % d == 0) columns = d;
  }
  return columns;
}

bool Supports(const ScheduleArgs& args, DType dtype) {
  return Columns(args.size) > 1 && IsReducible(dtype);
}

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = true;
  const int columns = Columns(args.size);
  const int rows = args.size / columns;
  const Ring all = RingOf(args);
  const int x = all.position % columns;
  const int y = all.position / columns;
  const auto at = [&](int r, int c) { return all.ranks[static_cast<size_t>(r * columns + c)]; };
  // Part c of `columns` is the slices [c rows, (c + 1) rows), joined as slice size + c.
  Ring row;
  row.position = x;
  for (int32_t c = 0; c < columns; ++c) {
    schedule.joined.push_back({c * rows, rows});
    row.ranks.push_back(at(y, c));
    row.slices.push_back(args.size + c);
  }
  const int part = (x + 1) % columns;  // what this rank has after the row
  Ring column;
  column.position = y;
  for (int32_t r = 0; r < rows; ++r) {
    column.ranks.push_back(at(r, x));
    column.slices.push_back(part * rows + r);
  }
  const std::vector<int32_t> in_row =
      AddRingReduceScatter(&schedule, row, {kRowReduce, Place::kInput, {}, /*finish=*/false});
  const std::vector<int32_t> in_column = AddRingReduceScatter(
      &schedule, column,
      {kColumnReduce, Place::kPartial, in_row[static_cast<size_t>(part)], /*finish=*/true});
  std::vector<After> slices(in_column.begin(), in_column.end());
  AddRingAllgather(&schedule, column, kColumnGather, &slices);
  std::vector<After> parts(in_row.begin(), in_row.end());
  After complete;
  for (const After& slice : slices) {
    for (int32_t step : slice.steps()) complete.And(step);
  }
  parts[static_cast<size_t>(part)] = complete;
  AddRingAllgather(&schedule, row, kRowGather, &parts);
  return schedule;
}

}  // namespace

AlgorithmEntry TorusAllreduce() { return {"torus", CollectiveKind::kAllreduce, Supports, Make}; }

}  // namespace tfdist
