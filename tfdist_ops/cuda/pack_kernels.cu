// Batched pack and unpack. One launch moves up to 128 tensors: a block finds its tensor in the
// table (7 comparisons), and moves one tile of 16 KiB of the narrower type. See pack_tile.h for the
// loop.
//
// Bytes moved: each element is read once and written once, so the limit is the memory's bandwidth;
// benchmarks/gpu_pack.py compares with a device-to-device copy of as many bytes.
#include <sstream>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "cuda/device.h"
#include "cuda/pack_kernels.h"
#include "cuda/pack_table.h"
#include "cuda/pack_tile.h"

namespace tfdist {
namespace {

static_assert(sizeof(PackTensor) == sizeof(tfdist_cuda_tensor), "one layout for both interfaces");

template <typename Tensor, typename Buffer, bool kPack, bool kScaled>
__global__ void __launch_bounds__(kPackThreads)
    PackKernel(const __grid_constant__ PackTable table, double scale) {
  RunPackBlock<Tensor, Buffer, kPack, kScaled>(table, static_cast<int32_t>(blockIdx.x),
                                               static_cast<int>(threadIdx.x), scale);
}

template <typename Tensor, typename Buffer, bool kPack>
Status Launch(const tfdist_cuda_batch& batch, cudaStream_t stream) {
  constexpr int64_t kTile = PackTileElements(sizeof(Tensor), sizeof(Buffer));
  const std::vector<PackTable> launches =
      PlanPack(reinterpret_cast<const PackTensor*>(batch.tensors), batch.count, batch.buffer,
               sizeof(Tensor), kTile);
  for (const PackTable& table : launches) {
    const unsigned int blocks = static_cast<unsigned int>(table.first_block[table.count]);
    if (batch.scale == 1.0) {
      PackKernel<Tensor, Buffer, kPack, false><<<blocks, kPackThreads, 0, stream>>>(table, 1.0);
    } else if constexpr (!std::is_integral_v<Tensor>) {
      PackKernel<Tensor, Buffer, kPack, true>
          <<<blocks, kPackThreads, 0, stream>>>(table, batch.scale);
    }
    TFDIST_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  }
  return Status();
}

struct KernelRow {
  DType tensor;
  DType buffer;
  Status (*pack)(const tfdist_cuda_batch&, cudaStream_t);
  Status (*unpack)(const tfdist_cuda_batch&, cudaStream_t);
};

template <typename Tensor, typename Buffer>
constexpr KernelRow Row(DType tensor, DType buffer) {
  return {tensor, buffer, &Launch<Tensor, Buffer, true>, &Launch<Tensor, Buffer, false>};
}

// The table of pairs; to add one, add a line.
constexpr KernelRow kKernels[] = {
    Row<float, float>(DType::kFloat32, DType::kFloat32),
    Row<Half, Half>(DType::kFloat16, DType::kFloat16),
    Row<Bfloat16, Bfloat16>(DType::kBfloat16, DType::kBfloat16),
    Row<double, double>(DType::kFloat64, DType::kFloat64),
    Row<int32_t, int32_t>(DType::kInt32, DType::kInt32),
    Row<int64_t, int64_t>(DType::kInt64, DType::kInt64),
    Row<float, Half>(DType::kFloat32, DType::kFloat16),
    Row<float, Bfloat16>(DType::kFloat32, DType::kBfloat16),
    Row<Half, float>(DType::kFloat16, DType::kFloat32),
    Row<Half, Bfloat16>(DType::kFloat16, DType::kBfloat16),
    Row<Bfloat16, float>(DType::kBfloat16, DType::kFloat32),
    Row<Bfloat16, Half>(DType::kBfloat16, DType::kFloat16),
};

Status InvalidArgument(const std::string& message) {
  return Status(Code::kInvalidArgument, "pack: " + message);
}

bool IsElementAligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

StatusOr<const KernelRow*> FindKernel(const tfdist_cuda_batch& batch) {
  const DType tensor = static_cast<DType>(batch.tensor_dtype);
  const DType buffer = static_cast<DType>(batch.buffer_dtype);
  for (const KernelRow& row : kKernels) {
    if (row.tensor != tensor || row.buffer != buffer) continue;
    if (batch.scale != 1.0 && !IsFloating(tensor)) {
      return InvalidArgument(std::string("expected scale 1 for ") + DTypeName(tensor) + ", got " +
                             std::to_string(batch.scale) + "; cast to a float type first");
    }
    return &row;
  }
  return InvalidArgument(std::string("no kernel for tensors of ") + DTypeName(tensor) +
                         " and a buffer of " + DTypeName(buffer) +
                         "; expected equal types, or two of float16, bfloat16, float32");
}

Status CheckTensors(const tfdist_cuda_batch& batch, const KernelRow& row) {
  if (batch.count < 0 || (batch.count > 0 && batch.tensors == nullptr)) {
    return InvalidArgument("expected a list of tensors, got " + std::to_string(batch.count) +
                           " tensors at no address");
  }
  if (!IsElementAligned(batch.buffer, DTypeSize(row.buffer))) {
    return InvalidArgument("the buffer is not aligned to its elements");
  }
  for (int64_t i = 0; i < batch.count; ++i) {
    const tfdist_cuda_tensor& tensor = batch.tensors[i];
    const auto name = [i] { return "tensor " + std::to_string(i); };  // a string takes 40 ns
    if (tensor.elements < 0 || tensor.offset < 0 || tensor.offset > batch.buffer_elements ||
        tensor.elements > batch.buffer_elements - tensor.offset) {
      return InvalidArgument(name() + " of " + std::to_string(tensor.elements) +
                             " elements at offset " + std::to_string(tensor.offset) +
                             " does not fit into a buffer of " +
                             std::to_string(batch.buffer_elements) + " elements");
    }
    if (tensor.elements > 0 && (tensor.data == nullptr || batch.buffer == nullptr)) {
      return InvalidArgument(name() + " or the buffer has no address");
    }
    if (!IsElementAligned(tensor.data, DTypeSize(row.tensor))) {
      return InvalidArgument(name() + " is not aligned to its elements");
    }
  }
  return Status();
}

Status Run(const tfdist_cuda_batch& batch, bool pack, cudaStream_t stream) {
  StatusOr<const KernelRow*> row = FindKernel(batch);
  if (!row.ok()) return row.status();
  TFDIST_RETURN_IF_ERROR(CheckTensors(batch, *row.value()));
  return pack ? row.value()->pack(batch, stream) : row.value()->unpack(batch, stream);
}

Status RunTimed(int32_t what, const tfdist_cuda_batch& batch, cudaStream_t stream) {
  if (what != TFDIST_CUDA_TIME_MEMCPY) return Run(batch, what == TFDIST_CUDA_TIME_PACK, stream);
  const size_t bytes = static_cast<size_t>(batch.tensors[0].elements) *
                       DTypeSize(static_cast<DType>(batch.tensor_dtype));
  TFDIST_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(batch.buffer, batch.tensors[0].data, bytes,
                                              cudaMemcpyDeviceToDevice, stream));
  return Status();
}

Status Time(int32_t what, const tfdist_cuda_batch& batch, int32_t runs, float* ms) {
  constexpr int kWarmUps = 3;
  if (what < TFDIST_CUDA_TIME_PACK || what > TFDIST_CUDA_TIME_MEMCPY || runs < 1) {
    return InvalidArgument("expected one of the three kinds and at least one run");
  }
  Stream stream;
  TFDIST_RETURN_IF_ERROR(stream.Create());
  std::vector<Event> events(static_cast<size_t>(runs) + 1);
  for (Event& event : events) TFDIST_RETURN_IF_ERROR(event.Create());
  for (int i = 0; i < kWarmUps; ++i) {
    TFDIST_RETURN_IF_ERROR(RunTimed(what, batch, stream.get()));
  }
  TFDIST_RETURN_IF_ERROR(events[0].Record(stream.get()));
  for (size_t i = 1; i < events.size(); ++i) {
    TFDIST_RETURN_IF_ERROR(RunTimed(what, batch, stream.get()));
    TFDIST_RETURN_IF_ERROR(events[i].Record(stream.get()));
  }
  TFDIST_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream.get()));
  for (size_t i = 1; i < events.size(); ++i) {
    TFDIST_RETURN_IF_ERROR(events[i].Since(events[i - 1], &ms[i - 1]));
  }
  return Status();
}

Status DeviceJson(std::string* json) {
  int device = 0;
  int driver = 0;
  int runtime = 0;
  cudaDeviceProp properties;
  TFDIST_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  TFDIST_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, device));
  TFDIST_RETURN_IF_CUDA_ERROR(cudaDriverGetVersion(&driver));
  TFDIST_RETURN_IF_CUDA_ERROR(cudaRuntimeGetVersion(&runtime));
  std::ostringstream out;
  out << "{\"name\": " << JsonQuote(properties.name) << ", \"capability\": \"" << properties.major
      << "." << properties.minor << "\", \"multiprocessors\": " << properties.multiProcessorCount
      << ", \"memory_bytes\": " << properties.totalGlobalMem << ", \"driver\": " << driver
      << ", \"runtime\": " << runtime << "}";
  *json = out.str();
  return Status();
}

std::string& LastError() {
  thread_local std::string message;
  return message;
}

int32_t Report(const Status& status) {
  if (!status.ok()) LastError() = status.message();
  return static_cast<int32_t>(status.code());
}

}  // namespace
}  // namespace tfdist

extern "C" {

int32_t tfdist_cuda_pack(const tfdist_cuda_batch* batch, void* stream) {
  return tfdist::Report(tfdist::Run(*batch, true, static_cast<cudaStream_t>(stream)));
}

int32_t tfdist_cuda_unpack(const tfdist_cuda_batch* batch, void* stream) {
  return tfdist::Report(tfdist::Run(*batch, false, static_cast<cudaStream_t>(stream)));
}

const char* tfdist_cuda_last_error(void) { return tfdist::LastError().c_str(); }

int32_t tfdist_cuda_device_count(void) {
  int count = 0;
  const tfdist::Status status =
      tfdist::CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return tfdist::Report(status) == 0 ? count : 0;
}

const char* tfdist_cuda_device_json(void) {
  thread_local std::string json;
  return tfdist::Report(tfdist::DeviceJson(&json)) == 0 ? json.c_str() : nullptr;
}

void* tfdist_cuda_alloc(int64_t bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes));
  return tfdist::Report(tfdist::CudaStatus(error, "cudaMalloc")) == 0 ? data : nullptr;
}

void tfdist_cuda_free(void* data) { cudaFree(data); }

int32_t tfdist_cuda_copy(void* to, const void* from, int64_t bytes) {
  return tfdist::Report(tfdist::CudaStatus(
      cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault), "cudaMemcpy"));
}

int32_t tfdist_cuda_time(int32_t what, const tfdist_cuda_batch* batch, int32_t runs, float* ms) {
  return tfdist::Report(tfdist::Time(what, *batch, runs, ms));
}

}  // extern "C"
