// Adasum: the rule by which two gradients become one, and the schedule that applies it to all.
//
//   adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b
//
// Orthogonal gradients are added, equal ones averaged. The result for more than two ranks is that
// of a binary tree over the ranks, adasum(adasum(g0, g1), adasum(g2, g3)): the rule is not
// associative.
//
// Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021
// (arXiv:2006.02924): the rule, the tree, and recursive vector halving (AdasumRVH).
#ifndef TFDIST_OPS_COLLECTIVE_ADASUM_H_
#define TFDIST_OPS_COLLECTIVE_ADASUM_H_

#include <cstdint>

#include "base/dtype.h"
#include "collective/schedule.h"

namespace tfdist {

// Dot products of two vectors, or of parts of them; those of parts are summed.
struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

// Factors of the two vectors. A vector of zeros leaves the other one unchanged.
struct PairFactors {
  double a = 1;
  double b = 1;
};
PairFactors FactorsOf(const Dots& dots);

// The dot products of two vectors of `n` elements, float32 or float64, computed in float64. The
// same elements give the same bits, wherever they lie.
Dots DotsOf(DType dtype, const uint8_t* a, const uint8_t* b, int64_t n);

// a = factors.a a + factors.b b, computed in float64 and rounded once. float32 or float64.
void AddPair(DType dtype, const PairFactors& factors, uint8_t* a, const uint8_t* b, int64_t n);

// The only algorithm of allreduce by ReduceOp::kAdasum (adasum_allreduce.cc), and of nothing else:
// it is not in the table of Algorithms().
const AlgorithmEntry& AdasumAllreduce();

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_ADASUM_H_
