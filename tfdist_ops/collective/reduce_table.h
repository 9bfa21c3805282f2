// Which loop reduces which type by which operation; one table for each instruction set, compiled in
// a file of its own: reduce_any.cc, reduce_avx2.cc, reduce_avx512.cc.
//
// A Processor compiles the loops that it runs for its instruction set:
//
//   struct Processor {
//     template <typename Type, typename Op>
//     static void Run(const Job& job);  // is Reduce<Type, Op>, with the attribute `target`
//     static void Widen(const uint8_t* half, float* single, int64_t count);  // of float16
//     static void Round(const float* single, uint8_t* half, int64_t count);
//   };
#ifndef TFDIST_OPS_COLLECTIVE_REDUCE_TABLE_H_
#define TFDIST_OPS_COLLECTIVE_REDUCE_TABLE_H_

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "collective/instruction_set.h"
#include "collective/reduce_block.h"
#include "collective/reduce_elements.h"

namespace tfdist {
namespace reduce_block {

// Kernels for what CheckReducible of base/reducible.h allows; null for everything else, and where
// the architecture lacks the set. A type that gains nothing from a set has a smaller set's kernel.
Kernel FindAny(DType dtype, ReduceOp op);
Kernel FindAvx2(DType dtype, ReduceOp op);
Kernel FindAvx512(DType dtype, ReduceOp op);
inline Kernel FindKernel(InstructionSet set, DType dtype, ReduceOp op) {
  switch (set) {
    case InstructionSet::kAvx512:
      return FindAvx512(dtype, op);
    case InstructionSet::kAvx2:
      return FindAvx2(dtype, op);
    default:
      return FindAny(dtype, op);
  }
}

// ---- One table.

template <typename Processor, typename Type>
Kernel FindReal(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:  // the division is in job.finish
      return &Processor::template Run<Type, Sum>;
    case ReduceOp::kMin:
      return &Processor::template Run<Type, Min>;
    case ReduceOp::kMax:
      return &Processor::template Run<Type, Max>;
    case ReduceOp::kProduct:
      return &Processor::template Run<Type, Product>;
    default:
      return nullptr;
  }
}

// T unsigned: the sign does not matter.
template <typename Processor, typename T>
Kernel FindLogical(ReduceOp op) {
  switch (op) {
    case ReduceOp::kLogicalAnd:
      return &Processor::template Run<Direct<T>, And>;
    case ReduceOp::kLogicalOr:
      return &Processor::template Run<Direct<T>, Or>;
    case ReduceOp::kLogicalXor:
      return &Processor::template Run<Direct<T>, Xor>;
    default:
      return nullptr;
  }
}

template <typename Processor, typename T>
Kernel FindInteger(ReduceOp op) {
  const Kernel kernel = FindReal<Processor, Direct<T>>(op);
  return kernel != nullptr ? kernel : FindLogical<Processor, std::make_unsigned_t<T>>(op);
}

// For bool, the minimum is the same as `and`, the maximum the same as `or`.
template <typename Processor>
Kernel FindBool(ReduceOp op) {
  if (op == ReduceOp::kMin) op = ReduceOp::kLogicalAnd;
  if (op == ReduceOp::kMax) op = ReduceOp::kLogicalOr;
  return FindLogical<Processor, uint8_t>(op);
}

template <typename Processor, typename T>
Kernel FindComplex(ReduceOp op) {
  if (op == ReduceOp::kProduct) return &Processor::template Run<Complex<T>, ComplexProduct>;
  const bool adds = op == ReduceOp::kSum || op == ReduceOp::kAverage;
  return adds ? &Processor::template Run<Complex<T>, Sum> : nullptr;
}

template <typename Processor>
Kernel FindIn(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32:
      return FindReal<Processor, Direct<float>>(op);
    case DType::kFloat64:
      return FindReal<Processor, Direct<double>>(op);
    case DType::kFloat16:
      return FindReal<Processor, Float16<Processor>>(op);
    case DType::kBfloat16:
      return FindReal<Processor, Bfloat16>(op);
    case DType::kInt8:
      return FindInteger<Processor, int8_t>(op);
    case DType::kInt16:
      return FindInteger<Processor, int16_t>(op);
    case DType::kInt32:
      return FindInteger<Processor, int32_t>(op);
    case DType::kInt64:
      return FindInteger<Processor, int64_t>(op);
    case DType::kUint8:
      return FindInteger<Processor, uint8_t>(op);
    case DType::kUint16:
      return FindInteger<Processor, uint16_t>(op);
    case DType::kUint32:
      return FindInteger<Processor, uint32_t>(op);
    case DType::kUint64:
      return FindInteger<Processor, uint64_t>(op);
    case DType::kBool:
      return FindBool<Processor>(op);
    case DType::kComplex64:
      return FindComplex<Processor, float>(op);
    case DType::kComplex128:
      return FindComplex<Processor, double>(op);
    default:
      return nullptr;
  }
}

}  // namespace reduce_block
}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_REDUCE_TABLE_H_
