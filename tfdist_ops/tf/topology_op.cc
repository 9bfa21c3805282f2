// TfdistTopology: this rank's place in the world when the op runs. A graph holds no rank or size as
// a constant, because the world may change under it.
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistTopology")
    .Output("topology: int32")  // rank, size, local_rank, local_size, cross_rank, cross_size
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(6));
      return absl::OkStatus();
    });

class TopologyOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({6}), &output));
    OP_REQUIRES(ctx, CoreApi() != nullptr,
                absl::InternalError("libtfdist_core.so comes from another build of tfdist"));
    CoreApi()->topology(output->flat<int32_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistTopology").Device(tensorflow::DEVICE_CPU), TopologyOp);

}  // namespace
}  // namespace tfdist
