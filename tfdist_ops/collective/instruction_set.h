// The instructions that the arithmetic of reductions is compiled for. All give the same bits.
#ifndef TFDIST_OPS_COLLECTIVE_INSTRUCTION_SET_H_
#define TFDIST_OPS_COLLECTIVE_INSTRUCTION_SET_H_

#include <cstdint>

namespace tfdist {

// Each contains those before it.
enum class InstructionSet : uint8_t {
  kAny,     // those of every processor of the architecture
  kAvx2,    // with F16C
  kAvx512,  // F, BW, DQ, VL
};
constexpr InstructionSet kInstructionSets[] = {InstructionSet::kAny, InstructionSet::kAvx2,
                                               InstructionSet::kAvx512};

const char* InstructionSetName(InstructionSet set);  // "any", "avx2", "avx512"

// Whether this processor runs `set` and the operating system saves its registers.
bool ProcessorHas(InstructionSet set);

// The largest set that this processor has; looked up once.
InstructionSet LargestInstructionSet();

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_INSTRUCTION_SET_H_
