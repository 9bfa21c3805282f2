// TfdistBroadcast: N tensors of one type get the values of rank `root`, in one operation.
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistBroadcast")
    .Input("tensors: N * T")
    .Output("values: N * T")
    .Attr("N: int >= 1")
    .Attr("T: type")  // what DTypeSize knows; a list here could not name the float8 types
    .Attr("tensor_name: string")
    .Attr("root: int >= 0")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(SameShapes);

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx, TFDIST_BROADCAST) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      tensorflow::Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(ForwardOrAllocate(ctx, i, &output));
      op->AddTensor(ctx->input(i), output->data(), i);
    }
    op->request().dtype = dtype_;
    op->request().root = root_;
    return absl::OkStatus();
  }

 private:
  tensorflow::DataType dtype_ = tensorflow::DT_INVALID;
  int32_t root_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("TfdistBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastOp);

}  // namespace
}  // namespace tfdist
