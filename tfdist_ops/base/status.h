// Status: the result of everything that can fail. The core throws nothing.
//
// The codes have TensorFlow's (absl's) numbers, so that the TensorFlow ops (tf/) convert them by
// value. Two codes of TensorFlow are never used: UNAVAILABLE (TensorFlow turns it into
// InternalError without its payload) and OUT_OF_RANGE (Keras takes it for the end of the data).
#ifndef TFDIST_OPS_BASE_STATUS_H_
#define TFDIST_OPS_BASE_STATUS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace tfdist {

enum class Code : int32_t {
  kOk = 0,
  kCancelled = 1,           // this rank's own step was cancelled
  kInvalidArgument = 3,     // a bad argument, detected on this rank alone
  kDeadlineExceeded = 4,    // a live peer did not come within the deadline
  kFailedPrecondition = 9,  // the ranks do not agree (shape, type, operation, root, ...)
  kAborted = 10,            // a peer was lost or failed, or the engine was shut down
  kInternal = 13,           // a bug in tfdist, lack of memory, or a failed system or CUDA call
};

// The machine-readable half of an error; empty fields are left out of the JSON.
struct ErrorRecord {
  std::string kind;    // "mismatch", "rank_failed", "timeout", "not_initialized", "cancelled", ...
  int rank = -1;       // the rank at fault, -1 when there is none
  std::string host;    // its host
  int64_t pid = 0;     // its process
  std::string tensor;  // name of the tensor or group concerned
  std::string cause;   // what happened, in words
  std::string detail;  // more: both values of a mismatch, the ranks that are missing

  std::string ToJson() const;
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(Code code, std::string message, std::string payload_json = "")
      : rep_(std::make_shared<Rep>(Rep{code, std::move(message), std::move(payload_json)})) {}
  Status(Code code, std::string message, const ErrorRecord& record)
      : Status(code, std::move(message), record.ToJson()) {}

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : Code::kOk; }
  const std::string& message() const { return rep_ ? rep_->message : Empty(); }
  const std::string& payload() const { return rep_ ? rep_->payload : Empty(); }

 private:
  struct Rep {
    Code code;
    std::string message;
    std::string payload;
  };
  static const std::string& Empty() {
    static const std::string empty;
    return empty;
  }
  std::shared_ptr<const Rep> rep_;
};

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose
  StatusOr(Status status) : status_(std::move(status)) {}  // NOLINT: implicit on purpose
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

#define TFDIST_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    ::tfdist::Status tfdist_status_ = (expr);        \
    if (!tfdist_status_.ok()) return tfdist_status_; \
  } while (false)

// "file.cc:12: message", for errors that only a bug can cause.
Status InternalError(const char* file, int line, const std::string& message);
#define TFDIST_INTERNAL(message) ::tfdist::InternalError(__FILE__, __LINE__, (message))

// `text` as a JSON string with its quotes; control characters escaped, bytes above 0x7f kept.
std::string JsonQuote(const std::string& text);

// The first characters of `text`, in at most `most_bytes` bytes of UTF-8: no character is cut.
std::string Shortened(const std::string& text, size_t most_bytes);

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_STATUS_H_
