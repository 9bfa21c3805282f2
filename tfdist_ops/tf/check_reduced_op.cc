// TfdistCheckReduced: uses counted elements of reduced gradients before a step of an optimizer, and
// fails where there are too few and the trace does not show where the step's gradients come from.
// TfdistCountReduced: adds elements of gradients that are right as they are. See reduced_elements.h.
#include <atomic>

#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistCheckReduced")
    // Of all gradients of the step, in one way of counting or another: the first of which there are
    // enough are used.
    .Input("elements: int64")
    .Attr("required: bool")   // whether it fails where there are not enough
    .Attr("message: string")  // of the error
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      return c->WithRank(c->input(0), 1, &unused);
    });

REGISTER_OP("TfdistCountReduced")
    .Input("elements: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      return c->WithRank(c->input(0), 0, &unused);
    });

class CheckReducedOp : public tensorflow::OpKernel {
 public:
  explicit CheckReducedOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("required", &required_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("message", &message_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tfdist_api_table* core = CoreApi();
    OP_REQUIRES(ctx, core != nullptr,
                absl::InternalError("libtfdist_core.so comes from another build of tfdist"));
    const auto elements = ctx->input(0).vec<int64_t>();
    const int64_t since = required_ ? since_.load(std::memory_order_relaxed) : 0;
    bool enough = false;
    for (int64_t i = 0; i < elements.size() && !enough; ++i) {
      enough = core->use_reduced(elements(i), since) != 0;
    }
    OP_REQUIRES(ctx, enough || !required_, absl::FailedPreconditionError(message_));
    since_.store(core->count_reduced(0), std::memory_order_relaxed);
  }

 private:
  bool required_ = true;
  std::string message_;
  std::atomic<int64_t> since_{0};  // the sum at the last step that was taken here
};

class CountReducedOp : public tensorflow::OpKernel {
 public:
  explicit CountReducedOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tfdist_api_table* core = CoreApi();
    if (core != nullptr) core->count_reduced(ctx->input(0).scalar<int64_t>()());
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistCheckReduced").Device(tensorflow::DEVICE_CPU), CheckReducedOp);
REGISTER_KERNEL_BUILDER(Name("TfdistCountReduced").Device(tensorflow::DEVICE_CPU), CountReducedOp);

}  // namespace
}  // namespace tfdist
