#include "collective/instruction_set.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tfdist {
namespace {

#if defined(__x86_64__)

// For avx2 and avx512, __builtin_cpu_supports also checks that the operating system saves the
// registers. It does not know F16C.
bool HasAvx2() {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2") != 0;
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
}

#else

bool HasAvx2() { return false; }
bool HasAvx512() { return false; }

#endif

}  // namespace

const char* InstructionSetName(InstructionSet set) {
  constexpr const char* kNames[] = {"any", "avx2", "avx512"};
  return kNames[static_cast<int>(set)];
}

bool ProcessorHas(InstructionSet set) { return set <= LargestInstructionSet(); }

InstructionSet LargestInstructionSet() {
  static const InstructionSet largest = HasAvx512() ? InstructionSet::kAvx512
                                        : HasAvx2() ? InstructionSet::kAvx2
                                                    : InstructionSet::kAny;
  return largest;
}

}  // namespace tfdist
