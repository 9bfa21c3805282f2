#include "collective/identity_element.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace tfdist {
namespace {

using Element = std::array<uint8_t, 16>;  // the first DTypeSize bytes of it

template <typename T>
Element Bytes(T value) {
  static_assert(sizeof(T) <= sizeof(Element), "an element is at most a complex128");
  Element out{};
  std::memcpy(out.data(), &value, sizeof(T));
  return out;
}

// Complex types take sums and products only.
double FloatingIdentity(ReduceOp op, double prescale) {
  const double sign = prescale < 0 ? -1.0 : 1.0;
  switch (op) {
    case ReduceOp::kMin:
      return sign * std::numeric_limits<double>::infinity();
    case ReduceOp::kMax:
      return -sign * std::numeric_limits<double>::infinity();
    case ReduceOp::kProduct:
      return prescale == 0 ? 1.0 : 1.0 / prescale;
    default:
      return -0.0 * sign;
  }
}

template <typename T>
Element IntegerIdentity(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return Bytes(std::numeric_limits<T>::max());
    case ReduceOp::kMax:
      return Bytes(std::numeric_limits<T>::lowest());
    case ReduceOp::kProduct:
    case ReduceOp::kLogicalAnd:
      return Bytes(T{1});
    default:
      return Element{};
  }
}

Element Identity(DType dtype, ReduceOp op, double prescale) {
  const double value = FloatingIdentity(op, prescale);
  switch (dtype) {
    case DType::kFloat16:
      return Bytes(FloatToHalf(static_cast<float>(value)));
    case DType::kBfloat16:
      return Bytes(FloatToBfloat16(static_cast<float>(value)));
    case DType::kFloat32:
      return Bytes(static_cast<float>(value));
    case DType::kFloat64:
      return Bytes(value);
    case DType::kComplex64: {
      const auto real = static_cast<float>(value);
      return Bytes(std::array<float, 2>{real, op == ReduceOp::kProduct ? 0.0f : real});
    }
    case DType::kComplex128:
      return Bytes(std::array<double, 2>{value, op == ReduceOp::kProduct ? 0.0 : value});
    case DType::kBool:
      return Bytes(static_cast<uint8_t>(op == ReduceOp::kMin || op == ReduceOp::kLogicalAnd));
    case DType::kInt8:
      return IntegerIdentity<int8_t>(op);
    case DType::kInt16:
      return IntegerIdentity<int16_t>(op);
    case DType::kInt32:
      return IntegerIdentity<int32_t>(op);
    case DType::kInt64:
      return IntegerIdentity<int64_t>(op);
    case DType::kUint8:
      return IntegerIdentity<uint8_t>(op);
    case DType::kUint16:
      return IntegerIdentity<uint16_t>(op);
    case DType::kUint32:
      return IntegerIdentity<uint32_t>(op);
    case DType::kUint64:
      return IntegerIdentity<uint64_t>(op);
    default:
      return Element{};
  }
}

}  // namespace

void FillIdentity(DType dtype, ReduceOp op, double prescale, uint8_t* out, int64_t elements) {
  const Element element = Identity(dtype, op, prescale);
  const size_t size = DTypeSize(dtype);
  const size_t bytes = static_cast<size_t>(elements) * size;
  if (bytes == 0) return;
  std::memcpy(out, element.data(), size);
  for (size_t done = size; done < bytes;) {
    const size_t n = std::min(done, bytes - done);
    std::memcpy(out + done, out, n);
    done += n;
  }
}

}  // namespace tfdist
