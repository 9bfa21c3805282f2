// The cases that every row of the algorithm table is run through.
#ifndef TFDIST_TESTS_CPP_SETTINGS_H_
#define TFDIST_TESTS_CPP_SETTINGS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "planned.h"

namespace tfdist {

extern const std::vector<int> kSizes;

// {0, 1, size-1, size, size+1, odd, > one segment}, and the border where tensors begin to be cut.
std::vector<int64_t> Lengths(int size, DType dtype);

// Where the ranks of a world of `size` may stand: on one host, each on its own, unequally on two or
// three, every other one.
std::vector<std::vector<int32_t>> Topologies(int size);

// Calls fn for every row of a kind, number of ranks and topology that matters to it, as far as the
// row supports float32 there. Slices of the longest of Lengths have several segments.
void ForEachRow(CollectiveKind kind, const std::function<void(Setting)>& fn);

// Rows by rank, for `pattern` 0: equal, 1: ragged with empty ones, 2: one has all.
std::vector<int64_t> RaggedRows(int size, int64_t n, int pattern);

// Numbers whose sums round: the order of additions shows in the bits.
Element Rough(int rank, size_t tensor, int64_t i);

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_SETTINGS_H_
