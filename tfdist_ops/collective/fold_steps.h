// Folding: any number of ranks becomes a power of two for algorithms that pair them by bits.
//
// With 2^k the highest power of two <= size and rest = size - 2^k: of the first 2 * rest ranks each
// even one gives its input to the next, which reduces both and stands for both; the even one gets
// the result at the end. The remaining 2^k ranks get virtual ranks 0 .. 2^k - 1 in their order.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on numbers of processes that
// are not powers of two.
#ifndef TFDIST_OPS_COLLECTIVE_FOLD_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_FOLD_STEPS_H_

#include <cstdint>

#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {

inline int HighestPowerOfTwo(int size) {
  int power = 1;
  while (2 * power <= size) power *= 2;
  return power;
}

struct Fold {
  Fold(int rank_in, int size) : rank(rank_in), power(HighestPowerOfTwo(size)), rest(size - power) {}

  bool out() const { return rank < 2 * rest && rank % 2 == 0; }  // stood for by rank + 1
  int virtual_rank() const { return rank < 2 * rest ? rank / 2 : rank - rest; }
  int RankOf(int v) const { return v < rest ? 2 * v + 1 : v + rest; }
  bool StandsForTwo(int v) const { return v < rest; }

  int rank;
  int power;
  int rest;
};

// A rank that is out: gives its input, gets the result.
inline void AddFoldedOut(Schedule* schedule, const Fold& fold, uint16_t out, uint16_t back,
                         int32_t slice) {
  const int32_t sent = Add(schedule, SendInput(out, slice, fold.rank + 1));
  Add(schedule, CopyFrom(back, slice, fold.rank + 1, sent));
}

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_FOLD_STEPS_H_
