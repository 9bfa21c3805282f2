#include "scheduler/row_counts.h"

#include <algorithm>

namespace tfdist {
namespace {

// The sum, or -1 when a number is negative or the sum does not fit.
int64_t SumOf(const std::vector<int64_t>& numbers) {
  int64_t sum = 0;
  for (int64_t number : numbers) {
    if (number < 0 || __builtin_add_overflow(sum, number, &sum)) return -1;
  }
  return sum;
}

std::vector<int64_t> MatrixRow(const std::vector<int64_t>& matrix, int row, int size) {
  const auto begin = matrix.begin() + static_cast<std::ptrdiff_t>(row) * size;
  return {begin, begin + size};
}

std::vector<int64_t> MatrixColumn(const std::vector<int64_t>& matrix, int column, int size) {
  std::vector<int64_t> out;
  for (int row = 0; row < size; ++row) {
    out.push_back(
        matrix[static_cast<size_t>(row) * static_cast<size_t>(size) + static_cast<size_t>(column)]);
  }
  return out;
}

bool IsRoot(const RequestInfo& own, const SetView& set) {
  return own.root == set.ranks[static_cast<size_t>(set.index)];
}

}  // namespace

bool HasRows(CollectiveKind kind) {
  return kind == CollectiveKind::kAllgather || kind == CollectiveKind::kGather ||
         kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kScatter ||
         kind == CollectiveKind::kAlltoall;
}

bool TakesSplits(CollectiveKind kind) {
  return kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kScatter ||
         kind == CollectiveKind::kAlltoall;
}

int64_t FirstDimension(const std::vector<int64_t>& shape) { return shape.empty() ? 1 : shape[0]; }

std::vector<int64_t> EvenSplits(int64_t rows, int size) {
  std::vector<int64_t> splits(static_cast<size_t>(size), rows / size);
  for (size_t i = 0; i < static_cast<size_t>(rows % size); ++i) ++splits[i];
  return splits;
}

std::vector<int64_t> SplitsOf(const RequestInfo& info, int size) {
  if (!info.splits.empty()) return info.splits;
  return EvenSplits(FirstDimension(info.shapes[0]), size);
}

std::vector<int64_t> AgreedRows(const std::vector<RequestInfo>& by_index, int root_index) {
  const int size = static_cast<int>(by_index.size());
  std::vector<int64_t> rows;
  switch (by_index[0].kind) {
    case CollectiveKind::kAllgather:
    case CollectiveKind::kGather:
      for (const RequestInfo& info : by_index) rows.push_back(FirstDimension(info.shapes[0]));
      return rows;
    case CollectiveKind::kReduceScatter:
      return SplitsOf(by_index[0], size);
    case CollectiveKind::kScatter:
      return SplitsOf(by_index[static_cast<size_t>(root_index)], size);
    case CollectiveKind::kAlltoall:
      for (const RequestInfo& info : by_index) {
        const std::vector<int64_t> splits = SplitsOf(info, size);
        rows.insert(rows.end(), splits.begin(), splits.end());
      }
      return rows;
    default:
      return rows;
  }
}

bool RowsFit(const std::vector<int64_t>& rows, const RequestInfo& own, const SetView& set) {
  const int size = set.size();
  const auto n = static_cast<size_t>(size);
  if (rows.size() != (own.kind == CollectiveKind::kAlltoall ? n * n : n)) return false;
  if (*std::min_element(rows.begin(), rows.end()) < 0) return false;
  const int64_t own_rows = FirstDimension(own.shapes[0]);
  switch (own.kind) {
    case CollectiveKind::kReduceScatter:
      if (SumOf(rows) != own_rows) return false;
      break;
    case CollectiveKind::kScatter:
      if (IsRoot(own, set) && SumOf(rows) != own_rows) return false;
      break;
    case CollectiveKind::kAlltoall:
      if (MatrixRow(rows, set.index, size) != SplitsOf(own, size)) return false;
      break;
    default:
      if (rows[static_cast<size_t>(set.index)] != own_rows) return false;
      break;
  }
  // The number of bytes to allocate for them must fit in int64_t.
  auto row_bytes = static_cast<int64_t>(DTypeSize(own.dtype));
  for (size_t i = 1; i < own.shapes[0].size(); ++i) {
    if (__builtin_mul_overflow(row_bytes, own.shapes[0][i], &row_bytes)) return false;
  }
  const int64_t total = SumOf(SourceRows(rows, own, set));
  int64_t bytes = 0;
  return total >= 0 && !__builtin_mul_overflow(total, row_bytes, &bytes);
}

int64_t OutputRows(const std::vector<int64_t>& rows, const RequestInfo& own, const SetView& set) {
  switch (own.kind) {
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kScatter:
      return rows[static_cast<size_t>(set.index)];
    case CollectiveKind::kGather:
      return IsRoot(own, set) ? SumOf(rows) : 0;
    default:
      return SumOf(SourceRows(rows, own, set));
  }
}

std::vector<int64_t> SourceRows(const std::vector<int64_t>& rows, const RequestInfo& own,
                                const SetView& set) {
  return own.kind == CollectiveKind::kAlltoall ? MatrixColumn(rows, set.index, set.size()) : rows;
}

}  // namespace tfdist
