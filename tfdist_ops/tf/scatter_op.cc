// TfdistScatter: every rank gets its part of the rows of rank `root`. Of the other ranks' tensors
// only the type and the shape of a row count.
#include "tf/rows_op.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistScatter")
    .Input("tensor: T")
    .Input("splits: int64")  // the rows that each rank gets, on the root; empty: the default
    .Input(kCallInput)
    .Output("rows: T")
    .Attr("T: type")  // what DTypeSize knows; a list here could not name the float8 types
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("root: int >= 0")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(RowsShape);

class ScatterOp : public RowsOp {
 public:
  explicit ScatterOp(tensorflow::OpKernelConstruction* ctx) : RowsOp(ctx, TFDIST_SCATTER) {}
};

REGISTER_KERNEL_BUILDER(Name("TfdistScatter").Device(tensorflow::DEVICE_CPU), ScatterOp);

}  // namespace
}  // namespace tfdist
