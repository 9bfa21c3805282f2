// TfdistReduceScatter: reduces a tensor over all ranks; every rank gets its part of the rows.
#include "tf/reduction.h"
#include "tf/rows_op.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistReduceScatter")
    .Input("tensor: T")
    .Input("splits: int64")  // the rows that each rank gets; empty: the default
    .Input(kCallInput)
    .Output("rows: T")
    .Output("agreed_splits: int64")  // never empty
    .Attr("T: {" TFDIST_REDUCED_TYPES "}")
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .TFDIST_REDUCTION_ATTRS
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .SetIsStateful()
    .SetShapeFn(RowsShape);

class ReduceScatterOp : public RowsOp {
 public:
  explicit ReduceScatterOp(tensorflow::OpKernelConstruction* ctx)
      : RowsOp(ctx, TFDIST_REDUCE_SCATTER) {
    OP_REQUIRES_OK(ctx, reduction_.Read(ctx));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    reduction_.Set(&op->request());
    return RowsOp::Prepare(ctx, op);
  }

 private:
  Reduction reduction_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReduceScatter").Device(tensorflow::DEVICE_CPU),
                        ReduceScatterOp);

}  // namespace
}  // namespace tfdist
