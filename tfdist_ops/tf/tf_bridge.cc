#include "tf/tf_bridge.h"

#include <atomic>
#include <cmath>
#include <exception>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "base/status.h"
#include "tf/call_text.h"
#include "tf/large_pages.h"

// Python reads this text in the file before it loads the library: a library of another TensorFlow
// is refused before any of its code runs.
extern "C" TFDIST_EXPORT const char tfdist_tf_built_for[];
const char tfdist_tf_built_for[] = "tfdist ops built for TensorFlow " TFDIST_TF_VERSION ";";

namespace {
std::atomic<int64_t> outputs_in_place{0};
std::atomic<int64_t> outputs_total{0};
}  // namespace

// {outputs that took over their input's buffer, all outputs that might have}, since the start.
extern "C" TFDIST_EXPORT void tfdist_tf_outputs(int64_t out[2]) {
  out[0] = outputs_in_place.load(std::memory_order_relaxed);
  out[1] = outputs_total.load(std::memory_order_relaxed);
}

namespace tfdist {
namespace {

constexpr char kPayloadUrl[] = "tfdist.error";
constexpr int64_t kShortElements = 16384;
// Ranks that call the same function at the same time come to its kernel 100 us apart: TensorFlow's
// threads are woken first. A thread that has left by then pays for two more thread switches.
constexpr int64_t kPatienceUs = 200;

// TensorFlow wraps a status' message into text about nodes and functions; the payload, a JSON
// object, keeps the bare one.
absl::Status MakeStatus(absl::StatusCode code, const std::string& message,
                        const std::string& payload) {
  absl::Status status(code, message);
  const std::string rest = payload.size() > 2 ? ", " + payload.substr(1) : "}";
  const std::string json = "{\"message\": " + JsonQuote(message) + rest;
  status.SetPayload(kPayloadUrl, absl::Cord(absl::string_view(json)));
  return status;
}

absl::Status OtherVersion() {
  const std::string message =
      "the core of tfdist and its operations for TensorFlow come from different builds; install "
      "tfdist again";
  return MakeStatus(absl::StatusCode::kInternal, message,
                    ErrorRecord{"internal", -1, "", 0, "", message, ""}.ToJson());
}

}  // namespace

const tfdist_api_table* CoreApi() {
  static const tfdist_api_table* const table = tfdist_api(TFDIST_API_VERSION);
  return table;
}

absl::Status StatusFromCore(const tfdist_status& status) {
  if (status.code == 0) return absl::OkStatus();
  auto code = static_cast<absl::StatusCode>(status.code);
  if (code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kOutOfRange) {
    code = absl::StatusCode::kInternal;
  }
  return MakeStatus(code, status.message != nullptr ? status.message : "",
                    status.payload != nullptr ? status.payload : "");
}

absl::Status InvalidArgument(const std::string& tensor_name, const std::string& message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, tensor_name + ": " + message,
                    ErrorRecord{"invalid_argument", -1, "", 0, tensor_name, message, ""}.ToJson());
}

absl::Status Mismatch(const std::string& message) {
  return MakeStatus(absl::StatusCode::kFailedPrecondition, message,
                    ErrorRecord{"mismatch", -1, "", 0, "", message, ""}.ToJson());
}

absl::Status ParseScale(const std::string& text, double* value) {
  if (absl::SimpleAtod(text, value) && std::isfinite(*value)) return absl::OkStatus();
  return absl::InvalidArgumentError("expected a finite number as scale, got \"" + text + "\"");
}

int InputsBeforeCall(tensorflow::shape_inference::InferenceContext* c) {
  int calls = 0;
  return c->GetAttr("calls", &calls).ok() ? c->num_inputs() - calls : c->num_inputs();
}

absl::Status SameShapes(tensorflow::shape_inference::InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
  return absl::OkStatus();
}

DoneOnce::~DoneOnce() {
  if (ctx_ == nullptr) return;
  Call(MakeStatus(absl::StatusCode::kInternal, "an operation was dropped unfinished",
                  ErrorRecord{"internal", -1, "", 0, "", "dropped unfinished", ""}.ToJson()));
}

void DoneOnce::Call(const absl::Status& status) {
  tensorflow::OpKernelContext* ctx = std::exchange(ctx_, nullptr);
  if (ctx == nullptr) return;
  if (!status.ok()) ctx->SetStatus(status);
  std::exchange(done_, nullptr)();
}

Operation::Operation(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done,
                     const std::string& name)
    : ctx_(ctx),
      cancellation_(ctx->cancellation_manager()),
      name_(name),
      done_(ctx, std::move(done)) {}

void Operation::AddTensor(const tensorflow::Tensor& input, void* output, uint64_t hint) {
  tfdist_tensor tensor{};
  tensor.input = input.data();
  tensor.output = output;
  tensor.hint = hint;
  tensors_.push_back(tensor);
  shapes_.push_back(input.shape());
}

void Operation::Submit(const std::shared_ptr<Operation>& op) {
  const tfdist_api_table* core = CoreApi();
  if (core == nullptr) return op->Finish(OtherVersion());
  std::vector<absl::InlinedVector<int64_t, 4>> dims(op->shapes_.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    for (const auto& dim : op->shapes_[i]) dims[i].push_back(dim.size);
    op->tensors_[i].rank = static_cast<int32_t>(dims[i].size());
    op->tensors_[i].dims = dims[i].data();
  }
  op->request_.name = op->name_.c_str();
  op->request_.tensors = op->tensors_.data();
  op->request_.tensor_count = static_cast<int32_t>(op->tensors_.size());
  op->request_.context = op.get();
  op->request_.done = &Operation::OnDone;

  // Before the submission: afterwards `done` may already have run and taken `ctx` away. A step that
  // is cancelled by now submits all the same, and cancels at once: that is how the peers, who wait
  // for this operation, learn that this rank has left the step.
  if (op->cancellation_ != nullptr) {
    op->token_ = op->cancellation_->get_cancellation_token();
    op->registered_ = op->cancellation_->RegisterCallback(op->token_, [op] { op->OnCancel(); });
    if (!op->registered_) op->OnCancel();
  }
  op->self_ = op;
  uint64_t id = 0;
  if (core->submit_and_help(&op->request_, &id, op->PatienceUs()) != 0) {
    op->self_.reset();
    op->Finish(StatusFromCore(core->last_error()));
    return;
  }
  op->SetId(id);
}

// A short operation ends sooner than two changes of threads take: the thread that submits it drives
// it. Buckets that overlap with others, and what is long, are left to the core's own thread.
int64_t Operation::PatienceUs() const {
  if (request_.bucket_count > 1) return 0;
  int64_t elements = 0;
  for (const tensorflow::TensorShape& shape : shapes_) elements += shape.num_elements();
  return elements <= kShortElements ? kPatienceUs : 0;
}

void Operation::OnDone(void* context, const tfdist_status* status) {
  // The last reference may be this one: it must outlive Finish.
  const std::shared_ptr<Operation> op = std::move(static_cast<Operation*>(context)->self_);
  op->Finish(op->error_.ok() ? StatusFromCore(*status) : op->error_);
}

void Operation::Finish(const absl::Status& status) {
  // The blocking DeregisterCallback would wait for an OnCancel that waits for the core, whose
  // thread this is. The callback holds a reference and touches nothing of the context.
  if (registered_) cancellation_->TryDeregisterCallback(token_);
  done_.Call(status);
}

void Operation::OnCancel() {
  uint64_t id = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cancel_requested_ = true;
    if (!has_id_) return;  // SetId will cancel
    id = id_;
  }
  CoreApi()->cancel(id);
}

void Operation::SetId(uint64_t id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    has_id_ = true;
    id_ = id;
    if (!cancel_requested_) return;
  }
  CoreApi()->cancel(id);
}

absl::Status AddInputs(tensorflow::OpKernelContext* ctx, Operation* op,
                       const std::vector<int64_t>& hints) {
  for (int i = 0; i < ctx->num_outputs(); ++i) {
    tensorflow::Tensor* output = nullptr;
    int forwarded = -1;
    TF_RETURN_IF_ERROR(
        ctx->forward_input_or_allocate_output({i}, i, ctx->input(i).shape(), &output, &forwarded));
    outputs_total.fetch_add(1, std::memory_order_relaxed);
    if (forwarded >= 0) {
      outputs_in_place.fetch_add(1, std::memory_order_relaxed);
    } else {
      AskForLargePages(*output);
    }
    op->AddTensor(ctx->input(i), output->data(), hints.empty() ? i : hints[i]);
  }
  return absl::OkStatus();
}

int32_t OwnRank() {
  int32_t topology[6] = {-1, -1, -1, -1, -1, -1};
  if (CoreApi() != nullptr) CoreApi()->topology(topology);
  return topology[0];
}

int32_t WorldSize() {
  int32_t topology[6] = {-1, -1, -1, -1, -1, -1};
  if (CoreApi() != nullptr) CoreApi()->topology(topology);
  return topology[1];
}

void NamePair(Operation* op, int32_t sender, int32_t receiver) {
  op->request().root = sender;
  op->request().peer = receiver;
  op->set_name(op->name() + " from " + std::to_string(sender) + " to " + std::to_string(receiver));
}

CollectiveOp::CollectiveOp(tensorflow::OpKernelConstruction* ctx, int32_t kind)
    : AsyncOpKernel(ctx), kind_(kind) {
  OP_REQUIRES_OK(ctx, ctx->GetAttr("tensor_name", &tensor_name_));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("timeout_s", &timeout_s_));
  // Operations of two ranks have no set, a barrier has no type, most have no root.
  if (ctx->HasAttr("process_set")) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("process_set", &process_set_));
  }
  int calls = 0;
  OP_REQUIRES_OK(ctx, ctx->GetAttr("calls", &calls));
  has_call_ = calls > 0;
  if (ctx->HasAttr("T")) OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  if (ctx->HasAttr("root")) OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
}

void CollectiveOp::ComputeAsync(tensorflow::OpKernelContext* ctx, DoneCallback done) {
  const auto op = std::make_shared<Operation>(ctx, std::move(done), tensor_name_);
  op->request().kind = kind_;
  op->request().timeout_s = timeout_s_;
  op->request().process_set = static_cast<uint32_t>(process_set_);
  op->request().dtype = dtype_;
  op->request().root = root_;
  absl::Status status;
  try {
    status = has_call_ ? PrepareCall(ctx, op.get()) : Prepare(ctx, op.get());
    if (status.ok()) return Operation::Submit(op);
  } catch (const std::exception& e) {
    status = absl::InternalError(op->name() + ": " + e.what());
  }
  op->Finish(status);
}

absl::Status CollectiveOp::PrepareCall(tensorflow::OpKernelContext* ctx, Operation* op) const {
  const tensorflow::Tensor& input = ctx->input(ctx->num_inputs() - 1);
  CallText call;
  if (input.dims() != 0 || !ParseCallText(input.scalar<tensorflow::tstring>()(), &call)) {
    return absl::InternalError("the text of a call has an unknown form");
  }
  op->set_name(call.name);
  op->request().timeout_s = call.timeout_s;
  op->request().process_set = call.process_set;
  TF_RETURN_IF_ERROR(Prepare(ctx, op));
  op->request().prescale *= call.prescale;  // 1 so far, or 0 where nothing is reduced
  op->request().postscale *= call.postscale;
  if (!call.group.empty()) op->set_group(call.group);
  return absl::OkStatus();
}

}  // namespace tfdist
