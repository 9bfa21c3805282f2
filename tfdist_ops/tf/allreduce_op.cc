// TfdistAllreduce: reduces N tensors of one type over all ranks, in one operation.
#include "tf/reduction.h"
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

// Stateful, so that it is neither folded nor merged with a twin;
// tfdist/collectives/tf_ops/op_library.py takes it out of the automatic order of stateful ops, so
// that operations overlap and ranks may trace in any order.
REGISTER_OP("TfdistAllreduce")
    .Input("tensors: N * T")
    .Input(kCallInput)
    .Output("reduced: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {" TFDIST_REDUCED_TYPES "}")
    .Attr(kCallCount)
    .Attr("tensor_name: string")
    .TFDIST_REDUCTION_ATTRS
    .Attr("timeout_s: float = 0.0")     // 0: TFDIST_TIMEOUT_S
    .Attr("process_set: int >= 0 = 0")  // 0: all ranks
    .Attr("repeats: bool = false")      // of tfdist_request
    .Attr("group: string = ''")         // id of the gradient group that this is a bucket of
    .Attr("bucket: int = 0")
    .Attr("bucket_count: int = 0")
    .Attr("tensor_indices: list(int) = []")  // one for each tensor; see collective/slicing.h
    .SetIsStateful()
    .SetShapeFn(SameShapes);

class AllreduceOp : public CollectiveOp {
 public:
  explicit AllreduceOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx, TFDIST_ALLREDUCE) {
    OP_REQUIRES_OK(ctx, reduction_.Read(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("repeats", &repeats_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("group", &group_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bucket_count", &bucket_count_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_indices", &hints_));
    OP_REQUIRES(
        ctx, hints_.empty() || static_cast<int>(hints_.size()) == ctx->num_outputs(),
        InvalidArgument(tensor_name(), "tensor_indices must be one for each tensor, or none"));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    tfdist_request& request = op->request();
    reduction_.Set(&request);
    request.repeats = repeats_ ? 1 : 0;
    request.group = group_.empty() ? nullptr : group_.c_str();
    request.bucket = bucket_;
    request.bucket_count = bucket_count_;
    return AddInputs(ctx, op, hints_);
  }

 private:
  Reduction reduction_;
  bool repeats_ = false;
  std::string group_;
  int32_t bucket_ = 0;
  int32_t bucket_count_ = 0;
  std::vector<int64_t> hints_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistAllreduce").Device(tensorflow::DEVICE_CPU), AllreduceOp);

}  // namespace
}  // namespace tfdist
