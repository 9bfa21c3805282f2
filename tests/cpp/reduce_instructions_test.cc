// Every instruction set that this processor has gives the bits of the plain one: for every type and
// operation, over random bits and special values, any length, address, number of contributions,
// factor and kind of output.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/reducible.h"
#include "check.h"
#include "collective/reduce_kernels.h"
#include "collective/reduce_table.h"
#include "elements.h"

namespace tfdist {
namespace {

using Bytes = std::vector<uint8_t>;

// ---- What is reduced. Of two NaNs that are added or multiplied, which one's bits go on is up to
// the compiler, which may swap the operands. So either none comes in (those that arise are all the
// same), or one contribution alone has some and the others are harmless, or only whether a result
// is a NaN is compared.

enum class Draw { kNoNan, kNanOfOne, kAnything };
constexpr Draw kDraws[] = {Draw::kNoNan, Draw::kNanOfOne, Draw::kAnything};

bool IsNanBits(DType dtype, uint64_t bits) {
  switch (dtype) {
    case DType::kFloat16:
      return (bits & 0x7fff) > 0x7c00;
    case DType::kBfloat16:
      return (bits & 0x7fff) > 0x7f80;
    case DType::kFloat32:
    case DType::kComplex64:
      return (bits & 0x7fffffff) > 0x7f800000;
    case DType::kFloat64:
    case DType::kComplex128:
      return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
    default:
      return false;
  }
}

size_t RealSize(DType dtype) { return DTypeSize(dtype) / (IsComplex(dtype) ? 2 : 1); }

// Bits of difficult real numbers of the type: zeros, subnormals, limits, infinities, NaNs that
// signal or carry something, and numbers of which two (or one, rounded to a half type) are a tie.
std::vector<uint64_t> SpecialBits(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xbc00, 0x4200, 0x6800,
              0x6801, 0xe800, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe15, 0x7c01};
    case DType::kBfloat16:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x3f80, 0xbf80, 0x4040, 0x4380,
              0x4381, 0xc380, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffd5, 0x7f81};
    case DType::kFloat32:
    case DType::kComplex64:
      return {0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x3f800000,
              0xbf800000, 0x3f801000, 0x3f803000, 0x3f808000, 0x3f818000, 0x33000000,
              0x33000001, 0x477fefff, 0x477ff000, 0x4b800000, 0x4b800001, 0x7f7fffff,
              0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001};
    case DType::kFloat64:
    case DType::kComplex128:
      return {0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800fffffffffffff,
              0x0010000000000000, 0x3ff0000000000000, 0xbff0000000000000, 0x4340000000000000,
              0x4340000000000001, 0x7fefffffffffffff, 0xffefffffffffffff, 0x7ff0000000000000,
              0xfff0000000000000, 0x7ff8000000000000, 0xfff8000000012345, 0x7ff0000000000001};
    default: {
      const uint64_t top = uint64_t{1} << (8 * DTypeSize(dtype) - 1);
      return {0, 0, 1, 2, 3, top - 1, top, top + 1, ~uint64_t{0}, ~uint64_t{1}};
    }
  }
}

// Real numbers by their bits, one of three at random.
Bytes Specials(DType dtype, int64_t elements, bool nans, std::mt19937_64* random) {
  const std::vector<uint64_t> special = SpecialBits(dtype);
  Bytes bytes(static_cast<size_t>(elements) * DTypeSize(dtype));
  for (size_t at = 0; at < bytes.size(); at += RealSize(dtype)) {
    uint64_t bits = 0;
    do {
      const uint64_t dice = (*random)();
      bits = dice % 3 == 0 ? (*random)() : special[(dice >> 8) % special.size()];
    } while (!nans && IsNanBits(dtype, bits));
    std::memcpy(bytes.data() + at, &bits, RealSize(dtype));  // little endian: the low bits
  }
  return bytes;
}

Bytes Harmless(DType dtype, int64_t elements, std::mt19937_64* random) {
  const size_t size = DTypeSize(dtype);
  Bytes bytes(static_cast<size_t>(elements) * size);
  for (size_t at = 0; at < bytes.size(); at += size) {
    const Element value(static_cast<double>(1 + (*random)() % 100) / 16, 1.5);
    StoreElement(dtype, value, bytes.data() + at);
  }
  return bytes;
}

// Contribution `index` of several.
Bytes Contribution(Draw draw, DType dtype, int64_t elements, int index, std::mt19937_64* random) {
  if (draw == Draw::kNanOfOne && index != 1) return Harmless(dtype, elements, random);
  return Specials(dtype, elements, draw != Draw::kNoNan, random);
}

// ---- One reduction, with any instructions.

struct Case {
  Draw draw = Draw::kNoNan;
  Reduction what;
  std::vector<Bytes> inputs;
  int64_t elements = 0;
};

std::string Describe(const Case& c, InstructionSet set) {
  return std::string(InstructionSetName(set)) + ": " + ReduceOpName(c.what.op) + " of " +
         std::to_string(c.inputs.size()) + " times " + std::to_string(c.elements) + " " +
         DTypeName(c.what.dtype) + ", " + std::to_string(c.what.partials) + " partial, " +
         (c.what.to_partial ? "to partial" : "finished") + ", prescale " +
         std::to_string(c.what.prescale) + ", divide " + std::to_string(c.what.finish.divide) +
         ", multiply " + std::to_string(c.what.finish.multiply) + ", draw " +
         std::to_string(static_cast<int>(c.draw));
}

// Where NaNs may meet. The parts of a complex product are sums of two products each.
bool NansMayMeet(const Case& c) {
  const bool selects = c.what.op == ReduceOp::kMin || c.what.op == ReduceOp::kMax;
  const bool pairs = IsComplex(c.what.dtype) && c.what.op == ReduceOp::kProduct;
  return (c.draw == Draw::kAnything && !selects) || (c.draw == Draw::kNanOfOne && pairs);
}

void MakeNansEqual(DType dtype, uint8_t* data, size_t bytes) {
  for (size_t at = 0; at < bytes; at += RealSize(dtype)) {
    uint64_t bits = 0;
    std::memcpy(&bits, data + at, RealSize(dtype));
    if (IsNanBits(dtype, bits)) std::memset(data + at, 0xff, RealSize(dtype));
  }
}

constexpr size_t kMargin = 64;

// The bytes in both outputs and around them.
Bytes Run(const Case& c, InstructionSet set) {
  std::vector<Bytes> shifted;
  std::vector<const uint8_t*> pointers;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    shifted.emplace_back(2 * i + 1, 0xee);
    shifted[i].insert(shifted[i].end(), c.inputs[i].begin(), c.inputs[i].end());
    pointers.push_back(shifted[i].data() + 2 * i + 1);
  }
  const DType to = c.what.to_partial ? AccumulationType(c.what.dtype) : c.what.dtype;
  const size_t bytes = static_cast<size_t>(c.elements) * DTypeSize(to);
  Bytes out(2 * bytes + 3 * kMargin, 0xee);
  ReduceWith(set, c.what, pointers.data(), static_cast<int>(pointers.size()), out.data() + kMargin,
             c.elements, out.data() + 2 * kMargin + bytes);
  if (NansMayMeet(c)) {
    MakeNansEqual(to, out.data() + kMargin, bytes);
    MakeNansEqual(to, out.data() + 2 * kMargin + bytes, bytes);
  }
  return out;
}

void ExpectSameBits(const Case& c) {
  const Bytes plain = Run(c, InstructionSet::kAny);
  for (InstructionSet set : kInstructionSets) {
    if (!ProcessorHas(set)) continue;
    CHECK_EQ_IN(Run(c, set) == plain, true, Describe(c, set));
  }
}

const std::vector<Finish>& FinishesOf(DType dtype) {
  static const std::vector<Finish> whole = {{1, 1.0}, {2, 1.0}, {3, 1.0}, {1000003, 1.0}};
  static const std::vector<Finish> scaled = {{1, 1.0}, {3, 1.0}, {1, 0.3}, {8, -1e-40}};
  return TakesScale(dtype) ? scaled : whole;
}

// Inputs alone, a partial result before them, and partial results alone.
void ExpectEveryKind(const Cell& cell, size_t count, int64_t elements, double prescale,
                     const Finish& finish, std::mt19937_64* random) {
  for (Draw draw : kDraws) {
    for (int partials : {0, 1, static_cast<int>(count)}) {
      for (bool to_partial : {false, true}) {
        Case c;
        c.draw = draw;
        c.what = {cell.dtype, cell.op, prescale, finish, partials, to_partial};
        c.elements = elements;
        for (int i = 0; i < static_cast<int>(count); ++i) {
          const DType dtype = i < partials ? AccumulationType(cell.dtype) : cell.dtype;
          c.inputs.push_back(Contribution(draw, dtype, elements, i, random));
        }
        ExpectSameBits(c);
      }
    }
  }
}

TEST(every_instruction_set_gives_the_same_bits) {
  std::mt19937_64 random(31);
  for (const Cell& cell : AllCells()) {
    for (size_t count : {1u, 2u, 3u, 5u}) {
      for (int64_t elements : {33, 130}) {
        for (double prescale : {1.0, 0.7}) {
          if (prescale != 1.0 && !TakesScale(cell.dtype)) continue;
          for (const Finish& finish : FinishesOf(cell.dtype)) {
            ExpectEveryKind(cell, count, elements, prescale, finish, &random);
          }
        }
      }
    }
  }
}

// The rest behind the last full vector, of every length.
TEST(every_length_up_to_two_vectors_gives_the_same_bits) {
  std::mt19937_64 random(37);
  for (const Cell& cell : AllCells()) {
    for (int64_t elements = 1; elements <= 130; ++elements) {
      Case c;
      c.what.dtype = cell.dtype;
      c.what.op = cell.op;
      c.elements = elements;
      for (int i = 0; i < 2; ++i) {
        c.inputs.push_back(Contribution(c.draw, cell.dtype, elements, i, &random));
      }
      ExpectSameBits(c);
    }
  }
}

TEST(the_output_may_be_a_contribution_with_every_instruction_set) {
  std::mt19937_64 random(41);
  for (const Cell& cell : AllCells()) {
    for (size_t target = 0; target < 3; ++target) {
      std::vector<Bytes> inputs;
      for (int i = 0; i < 3; ++i) {
        inputs.push_back(Contribution(Draw::kNoNan, cell.dtype, 1100, i, &random));
      }
      Reduction what;
      what.dtype = cell.dtype;
      what.op = cell.op;
      std::vector<Bytes> results;
      for (InstructionSet set : kInstructionSets) {
        if (!ProcessorHas(set)) continue;
        std::vector<Bytes> own = inputs;
        const uint8_t* pointers[] = {own[0].data(), own[1].data(), own[2].data()};
        ReduceWith(set, what, pointers, 3, own[target].data(), 1100);
        results.push_back(own[target]);
        CHECK_EQ_IN(results.back() == results.front(), true,
                    std::string(InstructionSetName(set)) + " " + DTypeName(cell.dtype) + " " +
                        ReduceOpName(cell.op));
      }
    }
  }
}

// ---- The tables.

TEST(a_processor_has_every_set_up_to_its_largest) {
  CHECK(ProcessorHas(InstructionSet::kAny));
  for (InstructionSet set : kInstructionSets) {
    CHECK_EQ(ProcessorHas(set), set <= LargestInstructionSet());
  }
}

TEST(half_types_have_kernels_of_their_own_in_every_set) {
  for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    std::vector<reduce_block::Kernel> kernels;
    for (InstructionSet set : kInstructionSets) {
      if (!ProcessorHas(set)) continue;
      const auto kernel = reduce_block::FindKernel(set, dtype, ReduceOp::kSum);
      CHECK(std::find(kernels.begin(), kernels.end(), kernel) == kernels.end());
      kernels.push_back(kernel);
    }
  }
}

TEST(a_kernel_exists_exactly_where_the_predicate_allows) {
  for (InstructionSet set : kInstructionSets) {
    if (!ProcessorHas(set)) continue;
    for (int32_t number = 0; number < 40; ++number) {
      for (int32_t op = 0; op <= static_cast<int32_t>(kLastElementwiseOp); ++op) {
        const auto dtype = static_cast<DType>(number);
        const auto reduce_op = static_cast<ReduceOp>(op);
        CHECK_EQ_IN(reduce_block::FindKernel(set, dtype, reduce_op) != nullptr,
                    CheckReducible(dtype, reduce_op).ok(),
                    std::string(InstructionSetName(set)) + " " + DTypeName(dtype) + " " +
                        ReduceOpName(reduce_op));
      }
    }
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
