// The attributes of operations that reduce.
#ifndef TFDIST_OPS_TF_REDUCTION_H_
#define TFDIST_OPS_TF_REDUCTION_H_

#include "tf/tf_bridge.h"

namespace tfdist {

// The types that can be reduced; base/reducible.h says which type takes which operation.
#define TFDIST_REDUCED_TYPES                                                                  \
  "half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32, uint64, " \
  "bool, complex64, complex128"

// For a REGISTER_OP. Factors are repr() of a float64: attributes are float32.
#define TFDIST_REDUCTION_ATTRS \
  Attr("reduce_op: int >= 0").Attr("prescale: string = '1.0'").Attr("postscale: string = '1.0'")

class Reduction {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
    std::string prescale, postscale;
    TF_RETURN_IF_ERROR(ctx->GetAttr("reduce_op", &op_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("prescale", &prescale));
    TF_RETURN_IF_ERROR(ctx->GetAttr("postscale", &postscale));
    TF_RETURN_IF_ERROR(ParseScale(prescale, &prescale_));
    return ParseScale(postscale, &postscale_);
  }
  void Set(tfdist_request* request) const {
    request->op = op_;
    request->prescale = prescale_;
    request->postscale = postscale_;
  }

 private:
  int32_t op_ = 0;
  double prescale_ = 1;
  double postscale_ = 1;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_REDUCTION_H_
