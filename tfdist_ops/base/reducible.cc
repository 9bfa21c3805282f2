#include "base/reducible.h"

#include <string>

namespace tfdist {
namespace {

struct Verdict {
  bool ok;
  const char* expected;  // operations that the type takes
  const char* remedy;
};

// For types that some operation takes.
Verdict Judge(DType dtype, ReduceOp op) {
  if (IsInteger(dtype)) {
    return {op != ReduceOp::kAdasum, "all but adasum",
            "Cast it first: tf.cast(value, tf.float32)."};
  }
  if (dtype == DType::kBool) {
    const bool ok = IsLogical(op) || op == ReduceOp::kMin || op == ReduceOp::kMax;
    const char* remedy = op == ReduceOp::kProduct
                             ? "For \"true on all ranks\" take logical_and."
                             : "To count, cast it first: tf.cast(value, tf.int32). For the "
                               "fraction that is true, cast it to tf.float32.";
    return {ok, "logical_and, logical_or, logical_xor, min or max", remedy};
  }
  if (IsComplex(dtype)) {
    const bool ok = op == ReduceOp::kSum || op == ReduceOp::kAverage || op == ReduceOp::kProduct;
    const char* remedy =
        "Complex numbers have no order: reduce tf.abs(value), "
        "tf.math.real(value) or tf.math.imag(value).";
    if (IsLogical(op)) remedy = "Cast it first: tf.cast(value, tf.bool).";
    if (op == ReduceOp::kAdasum) {
      remedy = "Adasum takes real numbers: reduce tf.math.real(value) and tf.math.imag(value).";
    }
    return {ok, "sum, average or product", remedy};
  }
  return {!IsLogical(op), "sum, average, min, max, product or adasum",
          "Cast it first: tf.cast(value, tf.bool)."};
}

}  // namespace

Status CheckReducible(DType dtype, ReduceOp op) {
  std::string message;
  if (!IsReducible(dtype)) {
    message =
        "Expected a dtype that can be reduced (integers, bool, floating-point types of 16 bits and "
        "more, complex), got " +
        std::string(DTypeSize(dtype) != 0 ? DTypeName(dtype)
                                          : "number " + std::to_string(static_cast<int>(dtype))) +
        ". Cast it first: tf.cast(value, tf.bfloat16).";
  } else {
    const Verdict verdict = Judge(dtype, op);
    if (verdict.ok) return Status();
    message = std::string("Expected an operation that ") + DTypeName(dtype) + " takes (" +
              verdict.expected + "), got " + ReduceOpName(op) + ". " + verdict.remedy;
  }
  return Status(Code::kInvalidArgument, message,
                ErrorRecord{"invalid_argument", -1, "", 0, "", message, ""});
}

}  // namespace tfdist
