// Elements of every type as complex numbers: what tests put into tensors, and what reductions of it
// are. Numbers are small and whole, so that reductions are exact in every type and any order of
// them gives the same bits.
#ifndef TFDIST_TESTS_CPP_ELEMENTS_H_
#define TFDIST_TESTS_CPP_ELEMENTS_H_

#include <complex>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace tfdist {

using Element = std::complex<double>;

// Every type that there is, by asking the table for all numbers.
std::vector<DType> AllTypes();

struct Cell {
  DType dtype;
  ReduceOp op;
};
// Every type with every operation that it takes.
std::vector<Cell> AllCells();

bool IsSigned(DType dtype);

// The value of rank `rank` at `i`. Up to 16 of them stay in the range of every type, added or
// multiplied.
Element SmallValue(DType dtype, ReduceOp op, int rank, int64_t i);

// Rounds once, to nearest even.
void StoreElement(DType dtype, Element value, uint8_t* at);

// The reduction of `values`, one a rank.
Element ReduceAll(DType dtype, ReduceOp op, const std::vector<Element>& values);

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_ELEMENTS_H_
