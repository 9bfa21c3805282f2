// DType: element types. The numbers are TensorFlow's DataType numbers, so that the TensorFlow ops
// (tf/) pass them through. Collectives that only move data carry all of them as bytes; what can be
// reduced is in reducible.h.
//
// Source: float16, float32 and float64 are binary16, binary32 and binary64 of IEEE 754-2008; the
// float8 types are those of P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022
// (arXiv:2209.05433). bfloat16: D. Kalamkar et al., "A Study of BFLOAT16 for Deep Learning
// Training", 2019 (arXiv:1905.12322).
#ifndef TFDIST_OPS_BASE_DTYPE_H_
#define TFDIST_OPS_BASE_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

enum class DType : int32_t {
  kInvalid = 0,
  kFloat32 = 1,
  kFloat64 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kComplex64 = 8,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kComplex128 = 18,
  kFloat16 = 19,
  kUint32 = 22,
  kUint64 = 23,
  kFloat8E5m2 = 24,
  kFloat8E4m3fn = 25,
};

enum class ReduceOp : int32_t {
  kSum = 0,
  kAverage = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kLogicalAnd = 5,
  kLogicalOr = 6,
  kLogicalXor = 7,
  kAdasum = 8,  // only for allreduce (collective/adasum.h)
};
constexpr ReduceOp kLastReduceOp = ReduceOp::kAdasum;
// The operations up to this one are elementwise (collective/reduce_kernels.h).
constexpr ReduceOp kLastElementwiseOp = ReduceOp::kLogicalXor;

size_t DTypeSize(DType dtype);       // bytes per element; 0 for an unknown type
const char* DTypeName(DType dtype);  // TensorFlow's spelling: "float32", "bfloat16", ...
bool IsReducible(DType dtype);       // some ReduceOp takes it: all types but the float8 ones
bool IsHalf(DType dtype);            // float16, bfloat16
bool IsFloating(DType dtype);        // float16, bfloat16, float32, float64
bool IsComplex(DType dtype);
bool IsInteger(DType dtype);            // signed and unsigned, not bool
bool TakesScale(DType dtype);           // prescale and postscale: floating and complex
const char* ReduceOpName(ReduceOp op);  // "sum", "average", "logical_and", ...
bool IsLogical(ReduceOp op);

// The type in which elements are added and partial results travel: float32 for the half types, so
// that they are rounded once, at the end; every other type itself. As P. Micikevicius et al.,
// "Mixed Precision Training", ICLR 2018, section 3.3.
DType AccumulationType(DType dtype);

// Scalar conversions: rounding to nearest even, exact to the wider type. The vector loops of
// collective/reduce_kernels.cc call these.
float HalfToFloat(uint16_t bits);
uint16_t FloatToHalf(float value);
inline float Bfloat16ToFloat(uint16_t bits) {
  union {
    uint32_t u;
    float f;
  } v{static_cast<uint32_t>(bits) << 16};
  return v.f;
}
inline uint16_t FloatToBfloat16(float value) {
  union {
    float f;
    uint32_t u;
  } v{value};
  if ((v.u & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((v.u >> 16) | 0x0040u);  // NaN
  return static_cast<uint16_t>((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_DTYPE_H_
