#include "settings.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"

namespace tfdist {

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

std::vector<int64_t> Lengths(int size, DType dtype) {
  const int64_t block = std::max<int64_t>(1, 64 / static_cast<int64_t>(DTypeSize(dtype)));
  const int64_t cut = block * size;
  return {0, 1, size - 1, size, size + 1, 37, cut - 1, cut, 3 * cut + 5};
}

std::vector<std::vector<int32_t>> Topologies(int size) {
  std::vector<std::vector<int32_t>> all = {{}};
  if (size == 1) return all;
  const auto add = [&](const std::function<int32_t(int)>& host) {
    std::vector<int32_t> host_of;
    for (int r = 0; r < size; ++r) host_of.push_back(host(r));
    all.push_back(host_of);
  };
  add([](int r) { return 100 - r; });
  add([](int r) { return r == 0 ? 4 : 2; });             // 1 + (size - 1)
  add([size](int r) { return r < (size + 1) / 2; });     // halves, 2 + 1
  add([](int r) { return r < 3 ? 0 : r < 5 ? 1 : 2; });  // 3 + 2 + 1
  add([](int r) { return r % 2; });
  return all;
}

void ForEachRow(CollectiveKind kind, const std::function<void(Setting)>& fn) {
  int rows = 0;
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != kind) continue;
    ++rows;
    for (int size : kSizes) {
      const bool by_host = std::string(entry.name).rfind("two_level", 0) == 0;
      for (const std::vector<int32_t>& host_of :
           by_host ? Topologies(size) : std::vector<std::vector<int32_t>>{{}}) {
        Setting s;
        s.entry = &entry;
        s.size = size;
        s.host_of = host_of;
        s.segment_bytes = 64;
        if (entry.supports({0, size, 0, host_of}, DType::kFloat32)) fn(s);
      }
    }
  }
  CHECK(rows > 0);
}

std::vector<int64_t> RaggedRows(int size, int64_t n, int pattern) {
  std::vector<int64_t> rows;
  for (int r = 0; r < size; ++r) {
    rows.push_back(pattern == 0 ? n : pattern == 1 ? n * (r % 3) / 2 + (r == 1) : r == 1 ? n : 0);
  }
  return rows;
}

Element Rough(int rank, size_t tensor, int64_t i) {
  return std::sin(static_cast<double>(i * 31 + 7) * (rank + 1) + static_cast<double>(tensor)) *
         std::pow(4.0, rank % 4);
}

}  // namespace tfdist
