// TfdistReadVariables: the values of many variables, in one call. A function with a read for each
// variable takes several times as long, which counts where it runs before each step.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tf/tf_bridge.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistReadVariables")
    .Input("handles: N * resource")
    .Output("values: dtypes")
    .Attr("N: int >= 1")
    .Attr("dtypes: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);

class ReadVariablesOp : public tensorflow::OpKernel {
 public:
  explicit ReadVariablesOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES(ctx, static_cast<int>(dtypes_.size()) == ctx->num_inputs(),
                absl::InvalidArgumentError("expected one type for each variable"));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      tensorflow::core::RefCountPtr<tensorflow::Var> variable;
      const tensorflow::ResourceHandle& handle = HandleFromInput(ctx, i);
      OP_REQUIRES_OK(ctx, LookupResource(ctx, handle, &variable));
      tensorflow::tf_shared_lock lock(*variable->mu());
      const tensorflow::Tensor& value = *variable->tensor();
      OP_REQUIRES(ctx, variable->is_initialized,
                  absl::FailedPreconditionError("expected an initialized variable, " +
                                                handle.name() + " is not initialized"));
      const tensorflow::DataType expected = dtypes_[static_cast<size_t>(i)];
      OP_REQUIRES(ctx, value.dtype() == expected,
                  absl::InvalidArgumentError(
                      "expected a variable of type " + tensorflow::DataTypeString(expected) +
                      ", got " + tensorflow::DataTypeString(value.dtype()) + ": " + handle.name()));
      // Without copy-on-read the output shares the variable's memory; an update then writes to new
      // memory as long as the output is in use.
      const bool needs_copy = variable->copy_on_read_mode.load();
      ctx->set_output(i, needs_copy ? tensorflow::tensor::DeepCopy(value) : value);
    }
  }

 private:
  tensorflow::DataTypeVector dtypes_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReadVariables").Device(tensorflow::DEVICE_CPU),
                        ReadVariablesOp);

}  // namespace
}  // namespace tfdist
