// TfdistCheckReduced: uses counted elements of reduced gradients before a step of an optimizer, and
// fails where there are too few and the trace does not show where the step's gradients come from.
// TfdistCountReduced: adds elements of gradients that are right as they are. See
// reduced_elements.h.
#include <mutex>

#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistCheckReduced")
    // Of all gradients of the step, in one way of counting or another: the first of which there are
    // enough are used. None: they are known not to be reduced.
    .Input("elements: int64")
    // Whether the optimizer has taken no step yet. That one may be there to make its variables,
    // which are broadcast after it: a warning.
    .Input("is_first: bool")
    .Attr("required: bool")   // whether it fails where there are not enough
    .Attr("message: string")  // of the error
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      return c->WithRank(c->input(1), 0, &unused);
    });

REGISTER_OP("TfdistCountReduced")
    .Input("elements: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      return c->WithRank(c->input(0), 0, &unused);
    });

const tfdist_api_table* CoreOr(tensorflow::OpKernelContext* ctx) {
  const tfdist_api_table* core = CoreApi();
  if (core == nullptr) {
    ctx->SetStatus(absl::InternalError("libtfdist_core.so comes from another build of tfdist"));
  }
  return core;
}

class CheckReducedOp : public tensorflow::OpKernel {
 public:
  explicit CheckReducedOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("required", &required_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("message", &message_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tfdist_api_table* core = CoreOr(ctx);
    if (core == nullptr) return;
    const auto elements = ctx->input(0).vec<int64_t>();
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t sum = core->count_reduced(0);
    for (int64_t i = 0; i < elements.size(); ++i) {
      // Steps between which less than one's gradients was reduced share what came before them.
      const bool is_new = sum - last_ >= elements(i);
      const int64_t since = is_new ? last_ : earlier_;
      if (core->use_reduced(elements(i), required_ ? since : 0) == 0) continue;
      earlier_ = since;
      if (is_new) last_ = sum;
      return;
    }
    if (!required_) return;
    OP_REQUIRES(ctx, ctx->input(1).scalar<bool>()(), absl::FailedPreconditionError(message_));
    LOG(WARNING) << message_;
  }

 private:
  bool required_ = true;
  std::string message_;
  std::mutex mutex_;
  // Sums of what was reduced, guarded by mutex_: at the last step that was taken here after new
  // gradients were reduced, and at the one before it.
  int64_t last_ = 0;
  int64_t earlier_ = 0;
};

class CountReducedOp : public tensorflow::OpKernel {
 public:
  explicit CountReducedOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tfdist_api_table* core = CoreOr(ctx);
    if (core != nullptr) core->count_reduced(ctx->input(0).scalar<int64_t>()());
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistCheckReduced").Device(tensorflow::DEVICE_CPU), CheckReducedOp);
REGISTER_KERNEL_BUILDER(Name("TfdistCountReduced").Device(tensorflow::DEVICE_CPU), CountReducedOp);

}  // namespace
}  // namespace tfdist
