// TfdistBarrier: ends when every rank has reached it. It counts as a side effect, so it keeps its
// place in the program.
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistBarrier")
    .Input(kCallInput)
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(SameShapes);

class BarrierOp : public CollectiveOp {
 public:
  explicit BarrierOp(tensorflow::OpKernelConstruction* ctx) : CollectiveOp(ctx, TFDIST_BARRIER) {}

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext*, Operation*) const override {
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistBarrier").Device(tensorflow::DEVICE_CPU), BarrierOp);

}  // namespace
}  // namespace tfdist
