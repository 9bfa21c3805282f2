// Selection: which algorithm runs a collective. A pure function of the kind, the type, the bytes,
// the ranks, their hosts and the tuning file; it never looks at a clock, so all ranks come to the
// same answer, on every run.
//
// "Bytes" are those of one request before it is fused with others: of a bucket, or of the tensors
// of one call; for the kinds with rows, of all ranks' rows. What a tensor meets in the queue must
// not change its bits, so requests are fused only when their algorithms add in the same order
// (SameBits); within such a family the size after fusion decides.
#ifndef TFDIST_OPS_COLLECTIVE_SELECTION_H_
#define TFDIST_OPS_COLLECTIVE_SELECTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "collective/schedule.h"

namespace tfdist {

// One line of a tuning file, for one topology: the algorithm for at most `up_to_bytes` bytes.
struct SizeRule {
  CollectiveKind kind = CollectiveKind::kAllreduce;
  bool half = false;  // true: for float16 and bfloat16, whose partial results are twice as wide;
                      // false: for all other types
  int64_t up_to_bytes = 0;
  std::string algorithm;
};
using SizeRules = std::vector<SizeRule>;  // ascending in up_to_bytes for each kind and half

// One line of a tuning file: a rule, and the topology that it was measured on: how many ranks there
// are on each host, hosts in the order of their first ranks.
struct TuningRule {
  std::vector<int32_t> hosts;
  SizeRule rule;
};
// The rules that were measured on the topology of `args`.
SizeRules RulesFor(const std::vector<TuningRule>& tuning, const ScheduleArgs& args);

// The algorithm named `wanted`; for "auto" the one that the rules give for `bytes` or, where they
// give none that supports the case, the table in selection.cc. Null: no algorithm has that name, or
// it does not support the case.
const AlgorithmEntry* SelectAlgorithm(CollectiveKind kind, const std::string& wanted,
                                      const ScheduleArgs& args, DType dtype, int64_t bytes,
                                      const SizeRules& rules = {});

// Whether two rows of one kind add in the same order, and so give the same bits.
bool SameBits(const AlgorithmEntry& a, const AlgorithmEntry& b);

// The algorithm for several requests fused together, each of which alone would run by `alone` or by
// one with the same bits: `chosen`, the choice for their total size, if it keeps the bits, else the
// one of that family that is made for large data.
const AlgorithmEntry* KeepBits(const AlgorithmEntry* alone, const AlgorithmEntry* chosen,
                               const ScheduleArgs& args, DType dtype);

// The bytes up to which an algorithm of `few_steps` steps that sends `more` times the data beats
// one of `many_steps` that sends `less` times the data, both for a rank and in units of 1 / size:
//   few_steps alpha + more / size n beta = many_steps alpha + less / size n beta
// with alpha / beta = kMessageBytes. 0 if the first takes no fewer steps; otherwise at most
// kMostCrossover, which is also the result if the first sends no more.
//
// Source: the forms of Thakur et al. 2005 (docs/algorithms.md), with the cost model of R. W.
// Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing
// 20 (1994).
int64_t CrossoverBytes(int64_t few_steps, int64_t more, int64_t many_steps, int64_t less, int size);

// Bytes that a link between hosts carries in the time that one more message takes: 33 us at 1
// Gbit/s, 3 us at 10 Gbit/s. A tuning file replaces this estimate.
constexpr int64_t kMessageBytes = int64_t{4} << 10;
constexpr int64_t kMostCrossover = int64_t{256} << 10;
// Inside a host, a message costs more than adding up to this many bytes on every rank.
constexpr int64_t kOneShotBytes = int64_t{32} << 10;

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_SELECTION_H_
