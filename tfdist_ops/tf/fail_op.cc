// TfdistFail: fails the step with a text that is made while the graph runs, as a mismatch between
// the ranks. An empty text is no failure.
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistFail")
    .Input("message: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      return c->WithRank(c->input(0), 0, &unused);
    });

class FailOp : public tensorflow::OpKernel {
 public:
  explicit FailOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const std::string message(ctx->input(0).scalar<tensorflow::tstring>()());
    if (!message.empty()) ctx->SetStatus(Mismatch(message));
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistFail").Device(tensorflow::DEVICE_CPU), FailOp);

}  // namespace
}  // namespace tfdist
