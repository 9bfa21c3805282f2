// TfdistRecv: a tensor from one other rank, which calls TfdistSend.
#include "tf/large_pages.h"
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistRecv")
    .Input("shape: int64")
    .Input("after: After")  // nothing of them is read; they tie the operation to the rank's graph
    .Input(kCallInput)
    .Output("value: T")
    .Attr("T: type")  // what DTypeSize knows; a list here could not name the float8 types
    .Attr("After: list(type) >= 0")
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("src: int >= 0")
    .Attr("timeout_s: float = 0.0")  // 0: TFDIST_TIMEOUT_S
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(0, &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    });

class RecvOp : public CollectiveOp {
 public:
  explicit RecvOp(tensorflow::OpKernelConstruction* ctx) : CollectiveOp(ctx, TFDIST_SENDRECV) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("src", &src_));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    tensorflow::TensorShape shape;
    TF_RETURN_IF_ERROR(tensorflow::TensorShapeUtils::MakeShape(
        ctx->input(0).flat<int64_t>().data(), ctx->input(0).NumElements(), &shape));
    tensorflow::Tensor* value = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &value));
    AskForLargePages(*value);
    op->AddTensor(*value, value->data(), 0);
    NamePair(op, src_, OwnRank());
    return absl::OkStatus();
  }

 private:
  int32_t src_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("TfdistRecv").Device(tensorflow::DEVICE_CPU), RecvOp);

}  // namespace
}  // namespace tfdist
