// TfdistGather: the rows of all ranks, in rank order, on rank `root`; no rows elsewhere.
#include "tf/rows_op.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistGather")
    .Input("tensor: T")
    .Input(kCallInput)
    .Output("rows: T")
    .Output("splits: int64")  // the rows of each rank, on every rank; for the gradient
    .Attr("T: type")          // what DTypeSize knows; a list here could not name the float8 types
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("root: int >= 0")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(RowsShape);

class GatherOp : public RowsOp {
 public:
  explicit GatherOp(tensorflow::OpKernelConstruction* ctx) : RowsOp(ctx, TFDIST_GATHER) {}
};

REGISTER_KERNEL_BUILDER(Name("TfdistGather").Device(tensorflow::DEVICE_CPU), GatherOp);

}  // namespace
}  // namespace tfdist
