#include "elements.h"

#include <algorithm>
#include <cstring>

#include "base/reducible.h"

namespace tfdist {
namespace {

template <typename T>
void Put(T value, uint8_t* at) {
  std::memcpy(at, &value, sizeof(T));
}

Element ReduceTwo(ReduceOp op, Element a, Element b) {
  const bool x = a != 0.0;
  const bool y = b != 0.0;
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a.real(), b.real());
    case ReduceOp::kMax:
      return std::max(a.real(), b.real());
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kLogicalAnd:
      return x && y ? 1.0 : 0.0;
    case ReduceOp::kLogicalOr:
      return x || y ? 1.0 : 0.0;
    case ReduceOp::kLogicalXor:
      return x != y ? 1.0 : 0.0;
    default:
      return a + b;
  }
}

// The division of an average, in the accumulation type.
Element DivideBy(DType dtype, Element sum, int size) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128:
      return {sum.real() / size, sum.imag() / size};
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kFloat32:
    case DType::kComplex64: {
      const auto divisor = static_cast<float>(size);
      return {static_cast<float>(sum.real()) / divisor, static_cast<float>(sum.imag()) / divisor};
    }
    default:
      return static_cast<double>(static_cast<int64_t>(sum.real()) / size);
  }
}

}  // namespace

std::vector<DType> AllTypes() {
  std::vector<DType> types;
  for (int32_t number = 1; number < 64; ++number) {
    const auto dtype = static_cast<DType>(number);
    if (DTypeSize(dtype) > 0) types.push_back(dtype);
  }
  return types;
}

std::vector<Cell> AllCells() {
  std::vector<Cell> cells;
  for (DType dtype : AllTypes()) {
    for (int32_t op = 0; op <= static_cast<int32_t>(kLastElementwiseOp); ++op) {
      const auto reduce_op = static_cast<ReduceOp>(op);
      if (CheckReducible(dtype, reduce_op).ok()) cells.push_back({dtype, reduce_op});
    }
  }
  return cells;
}

bool IsSigned(DType dtype) {
  return IsFloating(dtype) || IsComplex(dtype) || dtype == DType::kInt8 || dtype == DType::kInt16 ||
         dtype == DType::kInt32 || dtype == DType::kInt64;
}

Element SmallValue(DType dtype, ReduceOp op, int rank, int64_t i) {
  const auto mix = static_cast<int>((rank * 7 + i * 5 + i / 3) % 17);
  if (dtype == DType::kBool || IsLogical(op)) return mix % 3 == 0 ? 1.0 : 0.0;
  if (op == ReduceOp::kProduct) {
    const double factor = mix == 4 ? 2.0 : IsSigned(dtype) && mix % 2 == 0 ? -1.0 : 1.0;
    return IsComplex(dtype) && mix % 3 == 0 ? Element(0, factor) : Element(factor, 0);
  }
  const double real = IsSigned(dtype) ? mix % 15 - 7 : mix % 9;
  return {real, IsComplex(dtype) ? static_cast<double>((mix + rank) % 5 - 2) : 0.0};
}

void StoreElement(DType dtype, Element value, uint8_t* at) {
  const double v = value.real();
  const auto whole = static_cast<int64_t>(v);
  switch (dtype) {
    case DType::kFloat16:
      return Put(FloatToHalf(static_cast<float>(v)), at);
    case DType::kBfloat16:
      return Put(FloatToBfloat16(static_cast<float>(v)), at);
    case DType::kFloat32:
      return Put(static_cast<float>(v), at);
    case DType::kFloat64:
      return Put(v, at);
    case DType::kComplex64:
      return Put(std::complex<float>(value), at);
    case DType::kComplex128:
      return Put(value, at);
    case DType::kBool:
      return Put(static_cast<uint8_t>(v != 0), at);
    default:  // integers, and bits of types that are only moved
      std::memcpy(at, &whole, DTypeSize(dtype));
  }
}

Element ReduceAll(DType dtype, ReduceOp op, const std::vector<Element>& values) {
  Element total = values[0];
  if (IsLogical(op)) total = total != 0.0 ? 1.0 : 0.0;
  for (size_t r = 1; r < values.size(); ++r) total = ReduceTwo(op, total, values[r]);
  if (op != ReduceOp::kAverage) return total;
  return DivideBy(dtype, total, static_cast<int>(values.size()));
}

}  // namespace tfdist
