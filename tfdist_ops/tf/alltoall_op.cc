// TfdistAlltoall: every rank sends a part of its rows to every rank.
#include "tf/rows_op.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistAlltoall")
    .Input("tensor: T")
    .Input("splits: int64")  // the rows for each rank; empty: equal parts
    .Input(kCallInput)
    .Output("rows: T")
    .Output("received_splits: int64")  // the rows from each rank
    .Attr("T: type")  // what DTypeSize knows; a list here could not name the float8 types
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(RowsShape);

class AlltoallOp : public RowsOp {
 public:
  explicit AlltoallOp(tensorflow::OpKernelConstruction* ctx) : RowsOp(ctx, TFDIST_ALLTOALL) {}
};

REGISTER_KERNEL_BUILDER(Name("TfdistAlltoall").Device(tensorflow::DEVICE_CPU), AlltoallOp);

}  // namespace
}  // namespace tfdist
