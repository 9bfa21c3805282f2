// TfdistSend: hands a tensor to one other rank, which calls TfdistRecv.
#include <cstring>

#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistSend")
    .Input("tensor: T")
    .Input(kCallInput)
    .Output("sent: T")  // a scalar 0; gradients come in through it
    .Attr("T: type")    // what DTypeSize knows; a list here could not name the float8 types
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("dst: int >= 0")
    .Attr("timeout_s: float = 0.0")  // 0: TFDIST_TIMEOUT_S
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

class SendOp : public CollectiveOp {
 public:
  explicit SendOp(tensorflow::OpKernelConstruction* ctx) : CollectiveOp(ctx, TFDIST_SENDRECV) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dst", &dst_));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    tensorflow::Tensor* sent = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({}), &sent));
    std::memset(sent->data(), 0, sent->TotalBytes());  // 0 in every type
    // In place: nothing is written to the sender's tensor.
    op->AddTensor(ctx->input(0), ctx->input(0).data(), 0);
    NamePair(op, OwnRank(), dst_);
    return absl::OkStatus();
  }

 private:
  int32_t dst_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("TfdistSend").Device(tensorflow::DEVICE_CPU), SendOp);

}  // namespace
}  // namespace tfdist
