// TfdistAllgather: the rows of all ranks, in rank order. Ranks may have different numbers of rows,
// so the output is allocated when all are known; a scalar counts as one row.
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status AllgatherShape(InferenceContext* c) {
  const ShapeHandle input = c->input(0);
  c->set_output(1, c->Scalar());
  if (!c->RankKnown(input)) {
    c->set_output(0, c->UnknownShape());
    return absl::OkStatus();
  }
  if (c->Rank(input) == 0) {
    c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
    return absl::OkStatus();
  }
  ShapeHandle output;
  TF_RETURN_IF_ERROR(c->ReplaceDim(input, 0, c->UnknownDim(), &output));
  c->set_output(0, output);
  return absl::OkStatus();
}

REGISTER_OP("TfdistAllgather")
    .Input("tensor: T")
    .Output("rows: T")
    .Output("offset: int64")  // of this rank's first row in `rows`; the gradient cuts there
    .Attr("T: type")          // what DTypeSize knows; a list here could not name the float8 types
    .Attr("tensor_name: string")
    .Attr("timeout_s: float = 0.0")  // 0: TFDIST_TIMEOUT_S
    .SetIsStateful()
    .SetShapeFn(AllgatherShape);

// Runs on the core's completion thread.
absl::Status AllocateRows(Operation* op, const int64_t* rows, int32_t size, void** memory) {
  tensorflow::OpKernelContext* ctx = op->ctx();
  int64_t total = 0;
  int64_t offset = 0;
  for (int32_t r = 0; r < size; ++r) {
    if (r == op->rank()) offset = total;
    if (__builtin_add_overflow(total, rows[r], &total)) {
      return InvalidArgument(op->name(), "the rows of all ranks are more than 2^63");
    }
  }
  tensorflow::TensorShape shape = ctx->input(0).shape();
  if (shape.dims() == 0) {
    TF_RETURN_IF_ERROR(shape.AddDimWithStatus(total));
  } else {
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, total));
  }
  tensorflow::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
  tensorflow::Tensor* offset_output = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, tensorflow::TensorShape({}), &offset_output));
  offset_output->scalar<int64_t>()() = offset;
  // An empty tensor has no memory, but null would mean that there is none for its bytes.
  static char nothing;
  *memory = output->data() != nullptr ? output->data() : &nothing;
  return absl::OkStatus();
}

void* Allocate(void* context, const int64_t* rows, int32_t size) {
  auto* op = static_cast<Operation*>(context);
  void* memory = nullptr;
  absl::Status status;
  try {
    status = AllocateRows(op, rows, size, &memory);
  } catch (const std::exception& e) {
    status = absl::InternalError(op->name() + ": " + e.what());
  }
  if (!status.ok()) op->SetError(status);
  return status.ok() ? memory : nullptr;
}

class AllgatherOp : public CollectiveOp {
 public:
  explicit AllgatherOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx, TFDIST_ALLGATHER) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override {
    op->AddTensor(ctx->input(0), nullptr, 0);
    op->request().dtype = dtype_;
    op->request().allocate = &Allocate;
    return absl::OkStatus();
  }

 private:
  tensorflow::DataType dtype_ = tensorflow::DT_INVALID;
};

REGISTER_KERNEL_BUILDER(Name("TfdistAllgather").Device(tensorflow::DEVICE_CPU), AllgatherOp);

}  // namespace
}  // namespace tfdist
