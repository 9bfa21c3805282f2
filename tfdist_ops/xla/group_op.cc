// TfdistReduceGroup: reduces all gradients of a group, in a function that XLA compiles. Its kernel
// emits one custom call for the whole group, however many buckets that has: XLA runs custom calls
// one after another, in an order of its own, which with several calls could differ between ranks.
//
// TensorFlow's compiler headers cost minutes and gigabytes: nothing else belongs in this file.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "xla/group_call.h"
#include "xla/hlo/builder/xla_builder.h"
#include "xla/shape_util.h"

namespace tfdist {
namespace {

using Aliasing = std::pair<::xla::ShapeIndex, std::pair<int64_t, ::xla::ShapeIndex>>;

// Stateful: neither merged with a twin nor pruned. `after` is the `token` of the group before it in
// the same function, so that they run in that order.
REGISTER_OP("TfdistReduceGroup")
    .Input("after: float")
    .Input("tensors: T")
    .Output("token: float")
    .Output("reduced: T")
    .Attr(
        "T: list({half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, "
        "uint32, uint64, complex64, complex128}) >= 1")
    .Attr("tensor_name: string")             // a bucket's name is this and its number
    .Attr("group: string")                   // id of the gradient group
    .Attr("sizes: list(int) >= 1")           // how many of `tensors` each bucket has, in order
    .Attr("tensor_indices: list(int) >= 1")  // one for each tensor; see collective/slicing.h
    .Attr("reduce_op: int >= 0")
    .Attr("prescale: string")  // repr() of a float64: attributes are float32
    .Attr("postscale: string")
    .Attr("process_set: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    });

// A string of the attribute dictionary, which is MLIR text: any character that could end the string
// becomes a hexadecimal escape.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    const bool plain = absl::ascii_isalnum(c) || c == '_' || c == '.' || c == '-' || c == '/';
    if (plain) {
      quoted += static_cast<char>(c);
    } else {
      absl::StrAppend(&quoted, "\\", absl::Hex(c, absl::kZeroPad2));
    }
  }
  return quoted + "\"";
}

std::string Listed(const std::vector<int64_t>& numbers) {
  return absl::StrCat("array<i64: ", absl::StrJoin(numbers, ", "), ">");
}

// The bits of a factor, which Python wrote with repr(): so it arrives exactly.
absl::Status ReadScale(tensorflow::OpKernelConstruction* ctx, absl::string_view attribute,
                       int64_t* bits) {
  std::string text;
  TF_RETURN_IF_ERROR(ctx->GetAttr(attribute, &text));
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) {
    return absl::InvalidArgumentError("expected a finite number as scale, got \"" + text + "\"");
  }
  static_assert(sizeof(value) == sizeof(*bits));
  std::memcpy(bits, &value, sizeof(value));
  return absl::OkStatus();
}

class ReduceGroupOp : public tensorflow::XlaOpKernel {
 public:
  explicit ReduceGroupOp(tensorflow::OpKernelConstruction* ctx) : XlaOpKernel(ctx) {
    std::string name, group;
    std::vector<int64_t> sizes, hints;
    int64_t prescale = 0, postscale = 0;
    int64_t reduce_op = 0, process_set = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_name", &name));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("group", &group));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_indices", &hints));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reduce_op", &reduce_op));
    OP_REQUIRES_OK(ctx, ReadScale(ctx, "prescale", &prescale));
    OP_REQUIRES_OK(ctx, ReadScale(ctx, "postscale", &postscale));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("process_set", &process_set));
    attributes_ = absl::StrCat("{name = ", Quoted(name), ", group = ", Quoted(group),
                               ", sizes = ", Listed(sizes), ", tensor_indices = ", Listed(hints),
                               ", reduce_op = ", reduce_op, " : i64, prescale = ", prescale,
                               " : i64, postscale = ", postscale,
                               " : i64, process_set = ", process_set, " : i64}");
  }

  void Compile(tensorflow::XlaOpKernelContext* ctx) override {
    std::vector<::xla::XlaOp> inputs;
    std::vector<::xla::Shape> shapes;
    std::vector<Aliasing> in_place;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const absl::StatusOr<::xla::Shape> shape = ctx->InputXlaShape(i);
      OP_REQUIRES_OK(ctx, shape.status());
      inputs.push_back(ctx->Input(i));
      // Row-major, whatever XLA would like best: ranks add up element by element.
      shapes.push_back(::xla::ShapeUtil::MakeShapeWithDescendingLayout(shape->element_type(),
                                                                       shape->dimensions()));
      in_place.push_back({{i}, {i, {}}});
    }
    const ::xla::XlaOp call = ::xla::CustomCallWithLayout(
        ctx->builder(), std::string(kGroupCall), inputs, ::xla::ShapeUtil::MakeTupleShape(shapes),
        shapes, attributes_, /*has_side_effect=*/true, in_place, /*literal=*/nullptr,
        ::xla::CustomCallSchedule::SCHEDULE_NONE,
        ::xla::CustomCallApiVersion::API_VERSION_TYPED_FFI);
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      ctx->SetOutput(i, ::xla::GetTupleElement(call, i));
    }
  }

 private:
  std::string attributes_;
};

// Only for the CPU: nothing here has run on a GPU. Not REGISTER_XLA_OP, which adds to a list
// that TensorFlow reads once, when it first compiles something, perhaps before this is loaded.
REGISTER_KERNEL_BUILDER(Name("TfdistReduceGroup").Device(tensorflow::DEVICE_CPU_XLA_JIT),
                        ReduceGroupOp);

}  // namespace
}  // namespace tfdist
