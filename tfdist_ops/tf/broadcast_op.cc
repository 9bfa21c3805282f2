// TfdistBroadcast: N tensors of one type get the values of rank `root`, in one operation.
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistBroadcast")
    .Input("tensors: N * T")
    .Input(kCallInput)
    .Output("values: N * T")
    .Attr("N: int >= 1")
    .Attr("T: type")  // what DTypeSize knows; a list here could not name the float8 types
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("root: int >= 0")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(SameShapes);

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx, TFDIST_BROADCAST) {}

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    return AddInputs(ctx, op);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastOp);

}  // namespace
}  // namespace tfdist
