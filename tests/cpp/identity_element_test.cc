// The identity of every reduction of every type leaves every value as it is, bit for bit.
#include "collective/identity_element.h"

#include <cstring>
#include <vector>

#include "base/reducible.h"
#include "check.h"
#include "collective/reduce_kernels.h"
#include "elements.h"

namespace tfdist {
namespace {

TEST(a_reduction_with_the_identity_gives_the_other_operand) {
  int cells = 0;
  for (int32_t number = 0; number < 32; ++number) {
    const auto dtype = static_cast<DType>(number);
    for (int32_t o = 0; o <= static_cast<int32_t>(kLastElementwiseOp); ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!CheckReducible(dtype, op).ok()) continue;
      if (IsComplex(dtype) && op == ReduceOp::kProduct) continue;  // changes signs of zeros
      const size_t bytes = DTypeSize(dtype);
      // The zeros of both signs, one, and numbers whose bytes are small.
      const int64_t n = 64;
      std::vector<uint8_t> values(static_cast<size_t>(n) * bytes);
      FillIdentity(dtype, ReduceOp::kSum, 1, values.data(), 8);
      FillIdentity(dtype, ReduceOp::kProduct, 1, values.data() + 8 * bytes, 8);
      for (size_t i = 16 * bytes; i < values.size(); ++i) {
        values[i] = static_cast<uint8_t>((i * 7) % 50);
      }
      const bool truths = dtype == DType::kBool || IsLogical(op);
      if (truths) {
        for (size_t i = 0; i < values.size(); ++i) {
          values[i] = 0;
          if (i % bytes == 0 && dtype == DType::kBool) values[i] = (i / bytes) % 2;
        }
        if (dtype != DType::kBool) {
          FillIdentity(dtype, ReduceOp::kProduct, 1, values.data(), n / 2);
          std::memset(values.data() + values.size() / 2, 0, values.size() / 2);
        }
      }
      for (double prescale : {1.0, -2.0}) {
        if (prescale != 1.0 && !TakesScale(dtype)) continue;
        std::vector<uint8_t> identity(values.size());
        FillIdentity(dtype, op, prescale, identity.data(), n);
        std::vector<uint8_t> scaled(values.size());
        const uint8_t* alone[] = {values.data()};
        Reduce({dtype, op, prescale, {}, 0, false}, alone, 1, scaled.data(), n);
        for (int place : {0, 1}) {
          std::vector<uint8_t> out(values.size());
          const uint8_t* both[] = {place == 0 ? values.data() : identity.data(),
                                   place == 0 ? identity.data() : values.data()};
          Reduce({dtype, op, prescale, {}, 0, false}, both, 2, out.data(), n);
          CHECK_EQ_IN(out == scaled, true,
                      std::string(DTypeName(dtype)) + " " + ReduceOpName(op) + " prescale " +
                          std::to_string(prescale));
        }
        ++cells;
      }
    }
  }
  CHECK(cells > 100);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
