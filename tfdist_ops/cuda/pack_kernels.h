/* Batched pack and unpack of device tensors: many tensors <-> one buffer, with scale and cast.
 *
 * C interface of libtfdist_cuda.so (`make gpu`), for ctypes and for the backends of the core.
 * Functions that return int32_t give 0, or a code of base/status.h with tfdist_cuda_last_error()
 * filled. Nothing waits for the device unless it says so; `stream` is a cudaStream_t, null the
 * default stream.
 */
#ifndef TFDIST_OPS_CUDA_PACK_KERNELS_H_
#define TFDIST_OPS_CUDA_PACK_KERNELS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFDIST_CUDA_EXPORT __attribute__((visibility("default")))

typedef struct tfdist_cuda_tensor {
  void* data; /* device memory, aligned to its element */
  int64_t elements;
  int64_t offset; /* of the first element in the buffer, in elements of the buffer */
} tfdist_cuda_tensor;

/* One batch. The types are numbers of base/dtype.h. Tensors and buffer have one type, any of
 * float16, bfloat16, float32, float64, int32, int64; or two different ones of float16, bfloat16,
 * float32. Fastest where tensors and their places in the buffer are 16-byte aligned. Tensors must
 * not overlap in the buffer. `scale` multiplies in float32 (float64 for float64) before the one
 * rounding to the target type; with integers it must be 1. */
typedef struct tfdist_cuda_batch {
  const tfdist_cuda_tensor* tensors;
  int64_t count;
  int32_t tensor_dtype;
  int32_t buffer_dtype;
  void* buffer; /* device memory of `buffer_elements` elements */
  int64_t buffer_elements;
  double scale;
} tfdist_cuda_batch;

/* buffer[offset + i] = cast(tensor[i] * scale), one launch for every 128 tensors. */
TFDIST_CUDA_EXPORT int32_t tfdist_cuda_pack(const tfdist_cuda_batch* batch, void* stream);
/* tensor[i] = cast(buffer[offset + i] * scale). */
TFDIST_CUDA_EXPORT int32_t tfdist_cuda_unpack(const tfdist_cuda_batch* batch, void* stream);

/* The error of the calling thread's last failed call, as text. */
TFDIST_CUDA_EXPORT const char* tfdist_cuda_last_error(void);

/* ---- for checks and benchmarks without another CUDA library ---- */
/* Number of usable devices; 0 with tfdist_cuda_last_error() filled where there is no driver. */
TFDIST_CUDA_EXPORT int32_t tfdist_cuda_device_count(void);
/* JSON of the current device: name, compute capability, memory, driver and runtime version. */
TFDIST_CUDA_EXPORT const char* tfdist_cuda_device_json(void);
TFDIST_CUDA_EXPORT void* tfdist_cuda_alloc(int64_t bytes); /* null: tfdist_cuda_last_error() */
TFDIST_CUDA_EXPORT void tfdist_cuda_free(void* data);
/* Copies between host and device in any direction; waits. */
TFDIST_CUDA_EXPORT int32_t tfdist_cuda_copy(void* to, const void* from, int64_t bytes);

enum { TFDIST_CUDA_TIME_PACK = 0, TFDIST_CUDA_TIME_UNPACK = 1, TFDIST_CUDA_TIME_MEMCPY = 2 };
/* Runs `what` `runs` times after 3 unmeasured runs, in a stream of its own; ms[i] = device time of
 * run i. MEMCPY is the device-to-device copy of the first tensor's bytes to the buffer. Waits. */
TFDIST_CUDA_EXPORT int32_t tfdist_cuda_time(int32_t what, const tfdist_cuda_batch* batch,
                                            int32_t runs, float* ms);

#ifdef __cplusplus
}
#endif

#endif /* TFDIST_OPS_CUDA_PACK_KERNELS_H_ */
