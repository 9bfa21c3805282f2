// CUDA handles that close themselves, and CUDA errors as Status. Included by .cu files only.
#ifndef TFDIST_OPS_CUDA_DEVICE_H_
#define TFDIST_OPS_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "base/status.h"

namespace tfdist {

inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return Status(Code::kInternal, std::string(what) + ": " + cudaGetErrorName(error) + ", " +
                                     cudaGetErrorString(error));
}

#define TFDIST_RETURN_IF_CUDA_ERROR(call) \
  TFDIST_RETURN_IF_ERROR(::tfdist::CudaStatus((call), #call))

// A stream that does not wait for the default stream.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Status Create() {
    return CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                      "cudaStreamCreateWithFlags");
  }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A point in a stream, with a time.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Status Create() { return CudaStatus(cudaEventCreate(&event_), "cudaEventCreate"); }
  Status Record(cudaStream_t stream) {
    return CudaStatus(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  // Milliseconds on the device from `begin` to here; both must have happened.
  Status Since(const Event& begin, float* ms) const {
    return CudaStatus(cudaEventElapsedTime(ms, begin.event_, event_), "cudaEventElapsedTime");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_CUDA_DEVICE_H_
