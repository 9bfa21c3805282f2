// DType: element types. The numbers are TensorFlow's DataType numbers, so that the rim passes them
// through; broadcast and allgather carry any of them as bytes, reductions take six.
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
};

enum class ReduceOp : int32_t { kSum = 0, kAverage = 1, kMin = 2, kMax = 3 };

size_t DTypeSize(DType dtype);       // bytes an element; 0 for a type we do not know
const char* DTypeName(DType dtype);  // TensorFlow's spelling: "float32", "bfloat16", ...
bool IsReducible(DType dtype);       // float16/32/64, bfloat16, int32, int64
bool IsHalf(DType dtype);            // float16, bfloat16
bool IsFloating(DType dtype);
const char* ReduceOpName(ReduceOp op);  // "sum", "average", "min", "max"

// Scalar conversions, round to nearest even, exact on the way up. The vector loops of
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
