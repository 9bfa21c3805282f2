// Runs in the place of the custom call: hands every bucket of the group to the core, waits for all
// of them, returns one error or none. Compiles in seconds: XLA's headers of this interface stand
// alone.
//
// It blocks the thread that runs the compiled step. That thread has nothing else to do, since XLA
// runs one custom call at a time on the processor; the core does its work on threads of its own.
// The wait ends: the core calls every `done` once, at its deadline (TFDIST_TIMEOUT_S) at the latest
// where a rank does not come.
#include "xla/group_call.h"

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/c_api.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

// Python reads this text in the file before it loads the library.
extern "C" TFDIST_EXPORT const char tfdist_xla_built_for[];
const char tfdist_xla_built_for[] = "tfdist ops built for TensorFlow " TFDIST_TF_VERSION ";";

namespace xla::ffi {
// Of the TensorFlow that is running.
__attribute__((visibility("default"))) const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace tfdist {
namespace {

namespace ffi = ::xla::ffi;

// TensorFlow's number of a type, which is the core's; 0: none that is reduced.
int32_t CoreType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return 1;
    case ffi::DataType::F64:
      return 2;
    case ffi::DataType::S32:
      return 3;
    case ffi::DataType::U8:
      return 4;
    case ffi::DataType::S16:
      return 5;
    case ffi::DataType::S8:
      return 6;
    case ffi::DataType::C64:
      return 8;
    case ffi::DataType::S64:
      return 9;
    case ffi::DataType::BF16:
      return 14;
    case ffi::DataType::U16:
      return 17;
    case ffi::DataType::C128:
      return 18;
    case ffi::DataType::F16:
      return 19;
    case ffi::DataType::U32:
      return 22;
    case ffi::DataType::U64:
      return 23;
    default:
      return 0;
  }
}

// An error reaches TensorFlow as a code and a text. The record of it, which operations carry beside
// their text, goes at its end; tfdist.errors.from_tf finds it there.
ffi::Error ErrorOf(const tfdist_status& status) {
  const std::string message = status.message != nullptr ? status.message : "";
  const std::string record =
      status.payload != nullptr && *status.payload != '\0' ? status.payload : "{}";
  // UNAVAILABLE and OUT_OF_RANGE mean something else to TensorFlow and Keras.
  const bool other = status.code == 14 || status.code == 11;
  return ffi::Error(static_cast<ffi::ErrorCode>(other ? 13 : status.code),
                    "tfdist: " + message + " [tfdist.error " + record + "]");
}

// The buckets of one group in flight. Shared with the core until each has ended.
class Group {
 public:
  void Begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pending_;
  }
  void End(const tfdist_status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    --pending_;
    if (status.code != 0 && error_.success()) error_ = ErrorOf(status);
    if (pending_ == 0) ended_.notify_all();
  }
  ffi::Error Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return pending_ == 0; });
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  int pending_ = 0;   // guarded by mutex_
  ffi::Error error_;  // guarded by mutex_; the first
};

void OnDone(void* context, const tfdist_status* status) {
  const std::unique_ptr<std::shared_ptr<Group>> group(
      static_cast<std::shared_ptr<Group>*>(context));
  (*group)->End(*status);
}

double FromBits(int64_t bits) {
  double value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Bucket {
  std::string name;
  int32_t dtype = 0;
  std::vector<tfdist_tensor> tensors;
};

// The arguments, bucket by bucket. Argument and result 0 are the token.
ffi::Error ReadBuckets(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                       std::string_view name, ffi::Span<const int64_t> sizes,
                       ffi::Span<const int64_t> hints, std::vector<Bucket>* buckets) {
  size_t next = 0;
  for (size_t number = 0; number < sizes.size(); ++number) {
    Bucket bucket;
    bucket.name = std::string(name) + "." + std::to_string(number);
    for (int64_t i = 0; i < sizes[number]; ++i, ++next) {
      const auto input = args.get<ffi::AnyBuffer>(next + 1);
      auto output = rets.get<ffi::AnyBuffer>(next + 1);
      if (!input || !output || next >= hints.size()) {
        return ffi::Error::InvalidArgument(bucket.name + ": fewer tensors than were announced");
      }
      const int32_t dtype = CoreType(input->element_type());
      if (dtype == 0 || (bucket.dtype != 0 && dtype != bucket.dtype) ||
          (*output)->element_type() != input->element_type()) {
        return ffi::Error::InvalidArgument(bucket.name +
                                           ": expected tensors of one reducible type");
      }
      bucket.dtype = dtype;
      const ffi::AnyBuffer::Dimensions dims = input->dimensions();
      tfdist_tensor tensor{};
      tensor.input = input->untyped_data();
      tensor.output = (*output)->untyped_data();
      tensor.rank = static_cast<int32_t>(dims.size());
      tensor.dims = dims.begin();
      tensor.hint = static_cast<uint64_t>(hints[next]);
      bucket.tensors.push_back(tensor);
    }
    buckets->push_back(std::move(bucket));
  }
  return ffi::Error::Success();
}

ffi::Error ReduceGroup(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name,
                       std::string_view group_id, ffi::Span<const int64_t> sizes,
                       ffi::Span<const int64_t> hints, int64_t reduce_op, int64_t prescale,
                       int64_t postscale, int64_t process_set) {
  const tfdist_api_table* core = tfdist_api(TFDIST_API_VERSION);
  if (core == nullptr) {
    return ffi::Error::Internal(
        "libtfdist_core.so and libtfdist_xla.so come from different builds of tfdist; rebuild the "
        "second: make xla");
  }
  std::vector<Bucket> buckets;
  ffi::Error error = ReadBuckets(args, rets, name, sizes, hints, &buckets);
  if (error.failure()) return error;
  auto token = rets.get<ffi::AnyBuffer>(0);
  if (!token) return token.error();
  std::memset((*token)->untyped_data(), 0, (*token)->size_bytes());

  const std::string id(group_id);
  const auto group = std::make_shared<Group>();
  std::vector<uint64_t> submitted;
  for (size_t number = 0; number < buckets.size(); ++number) {
    Bucket& bucket = buckets[number];
    tfdist_request request{};
    request.kind = TFDIST_ALLREDUCE;
    request.name = bucket.name.c_str();
    request.dtype = bucket.dtype;
    request.op = static_cast<int32_t>(reduce_op);
    request.prescale = FromBits(prescale);
    request.postscale = FromBits(postscale);
    request.group = id.c_str();
    request.bucket = static_cast<int32_t>(number);
    request.bucket_count = static_cast<int32_t>(buckets.size());
    request.process_set = static_cast<uint32_t>(process_set);
    request.tensors = bucket.tensors.data();
    request.tensor_count = static_cast<int32_t>(bucket.tensors.size());
    auto context = std::make_unique<std::shared_ptr<Group>>(group);
    request.context = context.get();
    request.done = &OnDone;
    uint64_t operation = 0;
    group->Begin();
    if (core->submit(&request, &operation) != 0) {
      group->End(core->last_error());
      // The step has failed here: those that wait for the rest of it must know.
      for (const uint64_t before_it : submitted) core->cancel(before_it);
      break;
    }
    (void)context.release();  // OnDone has it
    submitted.push_back(operation);
  }
  // Not earlier: the core writes into XLA's memory until then.
  return group->Wait();
}

}  // namespace
}  // namespace tfdist

// Makes the custom call known to XLA; once. Null, or what is wrong.
extern "C" TFDIST_EXPORT const char* tfdist_xla_register();
const char* tfdist_xla_register() {
  namespace ffi = ::xla::ffi;
  if (tfdist_api(TFDIST_API_VERSION) == nullptr) {
    return "libtfdist_core.so and libtfdist_xla.so come from different builds of tfdist";
  }
  XLA_FFI_DEFINE_HANDLER(handler, tfdist::ReduceGroup,
                         ffi::Ffi::Bind()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<std::string_view>("name")
                             .Attr<std::string_view>("group")
                             .Attr<ffi::Span<const int64_t>>("sizes")
                             .Attr<ffi::Span<const int64_t>>("tensor_indices")
                             .Attr<int64_t>("reduce_op")
                             .Attr<int64_t>("prescale")
                             .Attr<int64_t>("postscale")
                             .Attr<int64_t>("process_set"));
  XLA_FFI_Error* error =
      ffi::Ffi::RegisterStaticHandler(ffi::GetXlaFfiApi(), tfdist::kGroupCall, "Host", handler);
  return error == nullptr ? nullptr : "XLA refused the custom call";
}
