#include "base/dtype.h"

#include <cstring>

namespace tfdist {
namespace {

struct DTypeRow {
  DType dtype;
  size_t size;
  const char* name;
};

constexpr DTypeRow kDTypes[] = {
    {DType::kFloat32, 4, "float32"},
    {DType::kFloat64, 8, "float64"},
    {DType::kInt32, 4, "int32"},
    {DType::kUint8, 1, "uint8"},
    {DType::kInt16, 2, "int16"},
    {DType::kInt8, 1, "int8"},
    {DType::kComplex64, 8, "complex64"},
    {DType::kInt64, 8, "int64"},
    {DType::kBool, 1, "bool"},
    {DType::kBfloat16, 2, "bfloat16"},
    {DType::kUint16, 2, "uint16"},
    {DType::kComplex128, 16, "complex128"},
    {DType::kFloat16, 2, "float16"},
    {DType::kUint32, 4, "uint32"},
    {DType::kUint64, 8, "uint64"},
    {DType::kFloat8E5m2, 1, "float8_e5m2"},
    {DType::kFloat8E4m3fn, 1, "float8_e4m3fn"},
};

const DTypeRow* Find(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float BitsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

size_t DTypeSize(DType dtype) {
  const DTypeRow* row = Find(dtype);
  return row != nullptr ? row->size : 0;
}

const char* DTypeName(DType dtype) {
  const DTypeRow* row = Find(dtype);
  return row != nullptr ? row->name : "invalid";
}

bool IsReducible(DType dtype) {
  return IsFloating(dtype) || IsComplex(dtype) || IsInteger(dtype) || dtype == DType::kBool;
}

bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

bool IsFloating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || IsHalf(dtype);
}

bool IsComplex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }

bool IsInteger(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUint8:
    case DType::kUint16:
    case DType::kUint32:
    case DType::kUint64:
      return true;
    default:
      return false;
  }
}

bool TakesScale(DType dtype) { return IsFloating(dtype) || IsComplex(dtype); }

const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kLogicalAnd:
      return "logical_and";
    case ReduceOp::kLogicalOr:
      return "logical_or";
    case ReduceOp::kLogicalXor:
      return "logical_xor";
    case ReduceOp::kAdasum:
      return "adasum";
  }
  return "invalid";
}

bool IsLogical(ReduceOp op) {
  return op == ReduceOp::kLogicalAnd || op == ReduceOp::kLogicalOr || op == ReduceOp::kLogicalXor;
}

DType AccumulationType(DType dtype) { return IsHalf(dtype) ? DType::kFloat32 : dtype; }

// NaN keeps its sign and payload and becomes quiet, in both directions: what the F16C instructions
// do, so that vector and scalar code give the same bits.
float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t mantissa = bits & 0x03ffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return BitsFloat(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (magnitude < 0x0400u) {  // zero, subnormal: mantissa * 2^-24 is exact in float32
    return BitsFloat(sign | FloatBits(static_cast<float>(mantissa) * 0x1p-24f));
  }
  return BitsFloat(sign | ((magnitude << 13) + 0x38000000u));  // exponent bias 127 - 15
}

uint16_t FloatToHalf(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is a multiple of 2^-24, which is the spacing of floats at 0.5: the
    // addition rounds to nearest even, and the low bits are the result.
    const uint32_t rounded = FloatBits(BitsFloat(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0x0fffu + odd) >> 13));
}

}  // namespace tfdist
