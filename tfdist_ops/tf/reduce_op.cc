// TfdistReduce: rank `root` gets N tensors of one type reduced over all ranks, in one operation;
// the others get their own back.
#include "tf/reduction.h"
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistReduce")
    .Input("tensors: N * T")
    .Input(kCallInput)
    .Output("values: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {" TFDIST_REDUCED_TYPES "}")
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("root: int >= 0")
    .TFDIST_REDUCTION_ATTRS
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(SameShapes);

class ReduceToRootOp : public CollectiveOp {
 public:
  explicit ReduceToRootOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx, TFDIST_REDUCE) {
    OP_REQUIRES_OK(ctx, reduction_.Read(ctx));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    reduction_.Set(&op->request());
    return AddInputs(ctx, op);
  }

 private:
  Reduction reduction_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReduce").Device(tensorflow::DEVICE_CPU), ReduceToRootOp);

}  // namespace
}  // namespace tfdist
