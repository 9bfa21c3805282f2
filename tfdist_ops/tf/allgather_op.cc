// TfdistAllgather: the rows of all ranks, in rank order, on every rank.
#include "tf/rows_op.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistAllgather")
    .Input("tensor: T")
    .Input(kCallInput)
    .Output("rows: T")
    .Output("splits: int64")  // the rows of each rank; the gradient cuts there
    .Attr("T: type")          // what DTypeSize knows; a list here could not name the float8 types
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(RowsShape);

class AllgatherOp : public RowsOp {
 public:
  explicit AllgatherOp(tensorflow::OpKernelConstruction* ctx) : RowsOp(ctx, TFDIST_ALLGATHER) {}
};

REGISTER_KERNEL_BUILDER(Name("TfdistAllgather").Device(tensorflow::DEVICE_CPU), AllgatherOp);

}  // namespace
}  // namespace tfdist
