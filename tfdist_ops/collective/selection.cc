#include "collective/selection.h"

#include <algorithm>
#include <cstring>

namespace tfdist {
namespace {

// Several hosts, each with several ranks.
bool SeveralOnEach(const std::vector<std::vector<int32_t>>& hosts) {
  return hosts.size() > 1 && std::all_of(hosts.begin(), hosts.end(),
                                         [](const auto& ranks) { return ranks.size() > 1; });
}

// ---- the table that decides where no file does

int64_t FloorLog2(int size) {
  int64_t log = 0;
  while ((size >> (log + 1)) > 0) ++log;
  return log;
}

bool IsPowerOfTwo(int size) { return (size & (size - 1)) == 0; }

// Ranks that are not all on one host, and types whose partial results are no wider. Butterfly takes
// log2 steps with all of the data in each; halving_doubling, with the same bits, twice as many with
// less; the ring 2 (size - 1) with as little, and only with neighbors.
const char* BetweenHosts(int64_t bytes, const ScheduleArgs& args) {
  const int64_t steps = FloorLog2(args.size);
  const int64_t least = 2 * (args.size - 1);  // in units of 1 / size of the data
  if (IsPowerOfTwo(args.size)) {
    const int64_t butterfly = CrossoverBytes(steps, steps * args.size, 2 * steps, least, args.size);
    if (bytes <= butterfly) return "butterfly";
    // In a sparse world its partners, at distances of powers of two, have links already.
    return args.sparse || bytes <= kMostCrossover ? "halving_doubling" : "ring";
  }
  if (args.sparse) return "ring";  // folding pairs ranks that have no link
  // Some ranks are folded onto others: two steps more, with all of the data.
  const int64_t folded = steps + 2;
  const int64_t butterfly = CrossoverBytes(folded, folded * args.size, least, least, args.size);
  return bytes <= butterfly ? "butterfly" : "ring";
}

// Two hosts with equally many ranks, a power of two: butterfly crosses once, with the data of all
// ranks of a host; two_level twice, with half of one rank's.
bool CrossesOnce(int64_t bytes, const std::vector<std::vector<int32_t>>& hosts) {
  const auto local = static_cast<int64_t>(hosts[0].size());
  return hosts.size() == 2 && hosts[1].size() == hosts[0].size() &&
         IsPowerOfTwo(static_cast<int>(local)) && bytes <= kMessageBytes / (local - 1);
}

const char* AllreduceDefault(DType dtype, int64_t bytes, const ScheduleArgs& args) {
  // Inside a host memory bandwidth is the limit, not messages: the owner of a slice reads all
  // inputs once and adds them in rank order, with one pass over the output instead of size - 1.
  // Few bytes cost less than a second message: every rank adds all of them, with the same bits.
  if (AllLocal(args) && !args.sparse) return bytes <= kOneShotBytes ? "one_shot" : "pairwise";
  const std::vector<std::vector<int32_t>> hosts = RanksByHost(args);
  if (SeveralOnEach(hosts)) return CrossesOnce(bytes, hosts) ? "butterfly" : "two_level";
  // Those of BetweenHosts send partial results, float32 for half types; pairwise sends inputs.
  if (!args.sparse && IsHalf(dtype)) return "pairwise";
  return BetweenHosts(bytes, args);
}

const char* ReduceScatterDefault(DType dtype, const ScheduleArgs& args) {
  if (args.sparse) return "ring";
  return AllLocal(args) || IsHalf(dtype) ? "pairwise" : "ring";
}

const char* Default(CollectiveKind kind, DType dtype, int64_t bytes, const ScheduleArgs& args) {
  switch (kind) {
    case CollectiveKind::kAllreduce:
      return AllreduceDefault(dtype, bytes, args);
    case CollectiveKind::kReduceScatter:
      return ReduceScatterDefault(dtype, args);
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
      return args.sparse ? "binomial" : "star";
    default:
      return nullptr;  // the first row of the kind
  }
}

const SizeRule* RuleFor(const SizeRules& rules, CollectiveKind kind, DType dtype, int64_t bytes) {
  for (const SizeRule& rule : rules) {
    const bool holds = rule.kind == kind && rule.half == IsHalf(dtype);
    if (holds && bytes <= rule.up_to_bytes) return &rule;
  }
  return nullptr;
}

const char* FamilyOf(const AlgorithmEntry& entry) {
  return entry.bits_of != nullptr ? entry.bits_of : entry.name;
}

}  // namespace

SizeRules RulesFor(const std::vector<TuningRule>& tuning, const ScheduleArgs& args) {
  SizeRules rules;
  std::vector<int32_t> hosts;
  for (const auto& ranks : RanksByHost(args)) hosts.push_back(static_cast<int32_t>(ranks.size()));
  for (const TuningRule& line : tuning) {
    if (line.hosts == hosts) rules.push_back(line.rule);
  }
  return rules;
}

const AlgorithmEntry* SelectAlgorithm(CollectiveKind kind, const std::string& wanted,
                                      const ScheduleArgs& args, DType dtype, int64_t bytes,
                                      const SizeRules& rules) {
  if (wanted != "auto") return FindAlgorithm(kind, wanted, args, dtype);
  const AlgorithmEntry* entry = nullptr;
  const SizeRule* rule = RuleFor(rules, kind, dtype, bytes);
  if (rule != nullptr) entry = FindAlgorithm(kind, rule->algorithm, args, dtype);
  const char* name = Default(kind, dtype, bytes, args);
  if (entry == nullptr && name != nullptr) entry = FindAlgorithm(kind, name, args, dtype);
  return entry != nullptr ? entry : FindAlgorithm(kind, "auto", args, dtype);
}

bool SameBits(const AlgorithmEntry& a, const AlgorithmEntry& b) {
  return a.kind == b.kind && std::strcmp(FamilyOf(a), FamilyOf(b)) == 0;
}

const AlgorithmEntry* KeepBits(const AlgorithmEntry* alone, const AlgorithmEntry* chosen,
                               const ScheduleArgs& args, DType dtype) {
  if (SameBits(*alone, *chosen)) return chosen;
  const AlgorithmEntry* large = FindAlgorithm(alone->kind, FamilyOf(*alone), args, dtype);
  return large != nullptr ? large : alone;
}

int64_t CrossoverBytes(int64_t few_steps, int64_t more, int64_t many_steps, int64_t less,
                       int size) {
  if (many_steps <= few_steps) return 0;
  if (more <= less) return kMostCrossover;
  const int64_t bytes = kMessageBytes * (many_steps - few_steps) * size / (more - less);
  return std::min(bytes, kMostCrossover);
}

}  // namespace tfdist
