// PackTable: which tensors one launch of the pack kernels moves, and which block moves which part.
// Plain C++, so that tests/cpp/pack_test.cc runs the same plan and the same loops on the host.
#ifndef TFDIST_OPS_CUDA_PACK_TABLE_H_
#define TFDIST_OPS_CUDA_PACK_TABLE_H_

#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#define TFDIST_HOST_DEVICE __host__ __device__
#else
#define TFDIST_HOST_DEVICE
#endif

namespace tfdist {

// The table travels as a kernel argument: no copy to the device, nothing to keep alive until the
// kernel has run. Arguments are limited to 4 KiB on every architecture, hence 128 tensors a launch.
constexpr int kPackMaxTensors = 128;
constexpr int kPackThreads = 256;  // of a block
constexpr int kPackUnroll = 4;     // accesses of 16 bytes of the narrower type a thread makes
constexpr int64_t kPackVectorBytes = 16;

// One tensor and its place in the buffer.
struct PackTensor {
  void* data;
  int64_t elements;
  int64_t offset;  // of its first element in the buffer, in elements
};

struct PackTable {
  uint8_t* buffer;
  uint8_t* data[kPackMaxTensors];
  int64_t elements[kPackMaxTensors];
  int64_t offset[kPackMaxTensors];
  int32_t first_block[kPackMaxTensors + 1];  // [count] = blocks of the launch
  int32_t count;
};
static_assert(sizeof(PackTable) <= 4096 - 64, "the table must fit into the kernel's arguments");

// Elements that a thread moves at once: one 16-byte access of the wider type, so that neighboring
// threads touch neighboring bytes on both sides.
TFDIST_HOST_DEVICE constexpr int PackVectorElements(int64_t tensor_bytes, int64_t buffer_bytes) {
  return static_cast<int>(kPackVectorBytes /
                          (tensor_bytes > buffer_bytes ? tensor_bytes : buffer_bytes));
}

// Elements of a whole block: 16 KiB of the narrower type.
TFDIST_HOST_DEVICE constexpr int64_t PackTileElements(int64_t tensor_bytes, int64_t buffer_bytes) {
  return int64_t{kPackThreads} * kPackUnroll * kPackVectorBytes /
         (tensor_bytes < buffer_bytes ? tensor_bytes : buffer_bytes);
}

// Cuts `tensors` into launches of at most kPackMaxTensors tensors and fewer than 2^31 blocks. Empty
// tensors take no block; no launch is empty. A tensor too large for one launch is cut at a tile.
inline std::vector<PackTable> PlanPack(const PackTensor* tensors, int64_t count, void* buffer,
                                       int64_t tensor_bytes, int64_t tile_elements) {
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  std::vector<PackTable> launches;
  PackTable table;
  table.count = 0;
  table.first_block[0] = 0;
  table.buffer = static_cast<uint8_t*>(buffer);
  const auto flush = [&] {
    if (table.count > 0) launches.push_back(table);
    table.count = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    int64_t begin = 0;
    while (begin < tensors[i].elements) {
      if (table.count == kPackMaxTensors || table.first_block[table.count] == kMaxBlocks) flush();
      const int64_t free_blocks = kMaxBlocks - table.first_block[table.count];
      int64_t elements = tensors[i].elements - begin;
      if ((elements - 1) / tile_elements >= free_blocks) elements = free_blocks * tile_elements;
      const int64_t blocks = (elements + tile_elements - 1) / tile_elements;
      table.data[table.count] = static_cast<uint8_t*>(tensors[i].data) + begin * tensor_bytes;
      table.elements[table.count] = elements;
      table.offset[table.count] = tensors[i].offset + begin;
      table.first_block[table.count + 1] =
          table.first_block[table.count] + static_cast<int32_t>(blocks);
      ++table.count;
      begin += elements;
    }
  }
  flush();
  return launches;
}

// The tensor that block `block` works on.
TFDIST_HOST_DEVICE inline int FindPackTensor(const PackTable& table, int32_t block) {
  int low = 0;
  int high = table.count;  // first_block[low] <= block < first_block[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace tfdist

#endif  // TFDIST_OPS_CUDA_PACK_TABLE_H_
