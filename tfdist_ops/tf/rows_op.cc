#include "tf/rows_op.h"

#include <algorithm>

#include "tf/large_pages.h"

namespace tfdist {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int kSplitsInput = 1;

// Runs on the core's completion thread.
absl::Status AllocateRows(Operation* op, const int64_t* rows, int32_t size, int64_t output_rows,
                          void** memory) {
  tensorflow::OpKernelContext* ctx = op->ctx();
  tensorflow::TensorShape shape = ctx->input(0).shape();
  if (shape.dims() == 0) {
    TF_RETURN_IF_ERROR(shape.AddDimWithStatus(output_rows));
  } else {
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, output_rows));
  }
  tensorflow::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &output));
  AskForLargePages(*output);
  if (ctx->num_outputs() > 1) {
    tensorflow::Tensor* by_rank = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, tensorflow::TensorShape({size}), &by_rank));
    std::copy(rows, rows + size, by_rank->flat<int64_t>().data());
  }
  // An empty tensor has no memory, but null would mean that the allocation failed.
  static char nothing;
  *memory = output->data() != nullptr ? output->data() : &nothing;
  return absl::OkStatus();
}

void* Allocate(void* context, const int64_t* rows, int32_t size, int64_t output_rows) {
  auto* op = static_cast<Operation*>(context);
  void* memory = nullptr;
  absl::Status status;
  try {
    status = AllocateRows(op, rows, size, output_rows, &memory);
  } catch (const std::exception& e) {
    status = absl::InternalError(op->name() + ": " + e.what());
  }
  if (!status.ok()) op->SetError(status);
  return status.ok() ? memory : nullptr;
}

}  // namespace

absl::Status RowsShape(InferenceContext* c) {
  if (c->num_outputs() > 1) c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
  if (InputsBeforeCall(c) > kSplitsInput) {
    ShapeHandle splits;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(kSplitsInput), 1, &splits));
  }
  const ShapeHandle input = c->input(0);
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

absl::Status RowsOp::Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const {
  op->AddTensor(ctx->input(0), nullptr, 0);
  op->request().allocate = &Allocate;
  if (ctx->num_inputs() > kSplitsInput && ctx->input_dtype(kSplitsInput) == tensorflow::DT_INT64) {
    const tensorflow::Tensor& splits = ctx->input(kSplitsInput);
    if (splits.dims() != 1) {
      return InvalidArgument(
          op->name(), "expected splits to be a vector, got shape " + splits.shape().DebugString());
    }
    op->request().splits = splits.flat<int64_t>().data();
    op->request().split_count = static_cast<int32_t>(splits.NumElements());
  }
  return absl::OkStatus();
}

}  // namespace tfdist
