// The bridge between TensorFlow's kernels and the core: one asynchronous operation from a kernel's
// ComputeAsync to its `done`. Only this folder and xla/ include TensorFlow headers; both reach the
// core through the C interface alone.
//
// Threads: ComputeAsync runs on an executor thread, `allocate` on the core's completion thread,
// `done` there or, for a short operation, in ComputeAsync itself (tfdist_submit_and_help), a
// cancellation callback on whatever thread cancels the step. No kernel blocks.
#ifndef TFDIST_OPS_TF_TF_BRIDGE_H_
#define TFDIST_OPS_TF_TF_BRIDGE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/c_api.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

// The core's functions; null when the core beside this library speaks another version.
const tfdist_api_table* CoreApi();

// Code by number, payload under "tfdist.error". UNAVAILABLE and OUT_OF_RANGE become INTERNAL:
// TensorFlow drops the payload of the first, and Keras takes the second for the end of the data.
absl::Status StatusFromCore(const tfdist_status& status);

// An error of this library's own, with the payload of kind "invalid_argument".
absl::Status InvalidArgument(const std::string& tensor_name, const std::string& message);
// Likewise, of kind "mismatch": the ranks differ.
absl::Status Mismatch(const std::string& message);

// A finite float64 from the text that Python's repr() made of it: attributes of TensorFlow are
// float32, a scale must arrive exactly.
absl::Status ParseScale(const std::string& text, double* value);

// The last input of a collective. TensorFlow keeps an eager kernel for every value of an attribute,
// 37 KiB each and for good. So an eager call passes what may differ in every call as a scalar
// string (call_text.h), which takes the place of the attributes. In a graph the list is empty.
constexpr char kCallInput[] = "call: calls * string";
constexpr char kCallCount[] = "calls: int >= 0";

// How many inputs there are before `call`.
int InputsBeforeCall(tensorflow::shape_inference::InferenceContext* c);

// Shape function: output i has the shape of input i.
absl::Status SameShapes(tensorflow::shape_inference::InferenceContext* c);

// TensorFlow's `done` of one kernel run. Calling consumes it; one destroyed uncalled calls itself
// with an error, because a kernel that never ends hangs its step for ever.
class DoneOnce {
 public:
  DoneOnce(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done)
      : ctx_(ctx), done_(std::move(done)) {}
  DoneOnce(const DoneOnce&) = delete;
  DoneOnce& operator=(const DoneOnce&) = delete;
  ~DoneOnce();

  // `ctx` is gone when this returns. A second call has no effect.
  void Call(const absl::Status& status);

 private:
  tensorflow::OpKernelContext* ctx_;  // null once called
  tensorflow::AsyncOpKernel::DoneCallback done_;
};

// One operation. Shared by the kernel that submits it, the core (through `self_`, until `done`) and
// the cancellation manager's callback, which may run while `done` does.
class Operation {
 public:
  Operation(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done,
            const std::string& name);

  // Valid until `done`.
  tensorflow::OpKernelContext* ctx() const { return ctx_; }
  const std::string& name() const { return name_; }
  // For values that are known only when the kernel runs; before Submit.
  void set_name(const std::string& name) { name_ = name; }
  void set_group(const std::string& group) {
    group_ = group;
    request_.group = group_.c_str();
  }
  // The request to submit; the tensors and callbacks are filled in by Submit.
  tfdist_request& request() { return request_; }

  // `output` is null where `allocate` gives it. `input` must stay alive until `done`; a kernel's
  // inputs do.
  void AddTensor(const tensorflow::Tensor& input, void* output, uint64_t hint);
  // The status that `done` reports instead of the core's; for errors inside `allocate`.
  void SetError(const absl::Status& status) { error_ = status; }

  // Hands `op` to the core and returns at once; an error goes to `done`.
  static void Submit(const std::shared_ptr<Operation>& op);
  // Ends an operation that was not submitted.
  void Finish(const absl::Status& status);

 private:
  int64_t PatienceUs() const;
  static void OnDone(void* context, const tfdist_status* status);
  void OnCancel();
  void SetId(uint64_t id);

  tensorflow::OpKernelContext* const ctx_;
  tensorflow::CancellationManager* const cancellation_;  // null: the caller cannot cancel
  std::string name_;
  std::string group_;
  DoneOnce done_;
  tfdist_request request_{};
  std::vector<tfdist_tensor> tensors_;
  std::vector<tensorflow::TensorShape> shapes_;
  absl::Status error_;
  bool registered_ = false;
  tensorflow::CancellationToken token_ = 0;
  std::shared_ptr<Operation> self_;  // holds the operation while the core has it

  // A step can be cancelled before tfdist_submit has returned the id to cancel by. `mutex_` is
  // never held while the core is called.
  std::mutex mutex_;
  bool has_id_ = false;            // guarded by mutex_
  bool cancel_requested_ = false;  // guarded by mutex_
  uint64_t id_ = 0;                // guarded by mutex_
};

// Adds an input to `op` for every output, which gets its shape: in the input's own buffer when
// nobody else needs it, else in a new one. `hints`: one for each input; empty: its index.
absl::Status AddInputs(tensorflow::OpKernelContext* ctx, Operation* op,
                       const std::vector<int64_t>& hints = {});

// The rank of this process; -1 before tfdist.init(), which Submit refuses.
int32_t OwnRank();
// How many ranks there are; -1 likewise.
int32_t WorldSize();

// Sets the partners and the name of a send and receive. Both ranks form the same name here, when
// the kernel runs: it is not known when the function is traced, and each rank counts its calls for
// each partner separately.
void NamePair(Operation* op, int32_t sender, int32_t receiver);

// Base of all collective kernels: the attributes below, where the operation has them, and the way
// from ComputeAsync to the core.
class CollectiveOp : public tensorflow::AsyncOpKernel {
 public:
  CollectiveOp(tensorflow::OpKernelConstruction* ctx, int32_t kind);
  void ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) final;

 protected:
  // Allocates outputs, adds tensors, and sets what is specific to the operation in the request.
  virtual absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const = 0;
  const std::string& tensor_name() const { return tensor_name_; }

 private:
  // Likewise, with the values of the input `call`.
  absl::Status PrepareCall(tensorflow::OpKernelContext* ctx, Operation* op) const;

  const int32_t kind_;
  bool has_call_ = false;
  std::string tensor_name_;
  float timeout_s_ = 0;
  int64_t process_set_ = 0;
  tensorflow::DataType dtype_ = tensorflow::DT_INVALID;
  int32_t root_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_TF_BRIDGE_H_
