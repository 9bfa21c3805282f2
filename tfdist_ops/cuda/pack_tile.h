// The work of one block of the pack kernels: element types, conversion, and the copy of one tile.
// Compiled for the device by pack_kernels.cu and for the host by tests/cpp/pack_test.cc.
#ifndef TFDIST_OPS_CUDA_PACK_TILE_H_
#define TFDIST_OPS_CUDA_PACK_TILE_H_

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "cuda/pack_table.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace tfdist {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

// Conversions go through float32 and round once, to nearest even. A NaN becomes a NaN; which one is
// up to the converter.
template <typename T>
TFDIST_HOST_DEVICE inline float ToFloat(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same_v<T, Half>) return __half2float(__ushort_as_half(value.bits));
    return __bfloat162float(__ushort_as_bfloat16(value.bits));
#else
    if constexpr (std::is_same_v<T, Half>) return HalfToFloat(value.bits);
    return Bfloat16ToFloat(value.bits);
#endif
  }
}

template <typename T>
TFDIST_HOST_DEVICE inline T FromFloat(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same_v<T, Half>) return T{__half_as_ushort(__float2half_rn(value))};
    return T{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
    if constexpr (std::is_same_v<T, Half>) return T{FloatToHalf(value)};
    return T{FloatToBfloat16(value)};
#endif
  }
}

// kScaled false and equal types: the bits are copied, NaNs included.
template <typename From, typename To, bool kScaled>
struct Convert {
  double scale;

  TFDIST_HOST_DEVICE To operator()(From value) const {
    if constexpr (std::is_same_v<From, To> && !kScaled) {
      return value;
    } else if constexpr (std::is_same_v<From, double>) {
      return value * scale;
    } else if constexpr (kScaled) {
      return FromFloat<To>(ToFloat<From>(value) * static_cast<float>(scale));
    } else {
      return FromFloat<To>(ToFloat<From>(value));
    }
  }
};

// Aligned so that the compiler moves it with one access, of at most 16 bytes.
template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) Vector {
  T element[kElements];
};

template <int kElements, typename T>
TFDIST_HOST_DEVICE inline bool IsVectorAligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector<T, kElements>) == 0;
}

template <int kElements, typename From, typename To, typename Converter>
TFDIST_HOST_DEVICE inline Vector<To, kElements> ConvertVector(const Vector<From, kElements>& from,
                                                              const Converter& convert) {
  Vector<To, kElements> to;
  for (int e = 0; e < kElements; ++e) to.element[e] = convert(from.element[e]);
  return to;
}

// Moves `count` <= kTile elements, kElements at once; `thread` is one of kPackThreads.
// Neighboring threads touch neighboring addresses. In a whole, aligned tile each thread first
// issues all its loads, then converts and stores.
template <int kElements, int64_t kTile, typename From, typename To, typename Converter>
TFDIST_HOST_DEVICE inline void MoveTile(const From* from, To* to, int64_t count, int thread,
                                        const Converter& convert) {
  int64_t done = 0;
  if (IsVectorAligned<kElements>(from) && IsVectorAligned<kElements>(to)) {
    const auto* source = reinterpret_cast<const Vector<From, kElements>*>(from);
    auto* target = reinterpret_cast<Vector<To, kElements>*>(to);
    const int64_t vectors = count / kElements;
    if (count == kTile) {
      constexpr int kUnroll = static_cast<int>(kTile / (kPackThreads * kElements));
      Vector<From, kElements> loaded[kUnroll];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int i = 0; i < kUnroll; ++i) loaded[i] = source[i * kPackThreads + thread];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int i = 0; i < kUnroll; ++i) {
        target[i * kPackThreads + thread] = ConvertVector<kElements, From, To>(loaded[i], convert);
      }
    } else {
      for (int64_t i = thread; i < vectors; i += kPackThreads) {
        target[i] = ConvertVector<kElements, From, To>(source[i], convert);
      }
    }
    done = vectors * kElements;
  }
  for (int64_t i = done + thread; i < count; i += kPackThreads) to[i] = convert(from[i]);
}

// One block of one launch: pack (tensor to buffer) or unpack (buffer to tensor).
template <typename Tensor, typename Buffer, bool kPack, bool kScaled>
TFDIST_HOST_DEVICE inline void RunPackBlock(const PackTable& table, int32_t block, int thread,
                                            double scale) {
  constexpr int kElements = PackVectorElements(sizeof(Tensor), sizeof(Buffer));
  constexpr int64_t kTile = PackTileElements(sizeof(Tensor), sizeof(Buffer));
  const int t = FindPackTensor(table, block);
  const int64_t begin = (block - table.first_block[t]) * kTile;
  const int64_t left = table.elements[t] - begin;
  const int64_t count = left < kTile ? left : kTile;
  Tensor* tensor = reinterpret_cast<Tensor*>(table.data[t]) + begin;
  Buffer* buffer = reinterpret_cast<Buffer*>(table.buffer) + table.offset[t] + begin;
  if constexpr (kPack) {
    MoveTile<kElements, kTile>(tensor, buffer, count, thread,
                               Convert<Tensor, Buffer, kScaled>{scale});
  } else {
    MoveTile<kElements, kTile>(buffer, tensor, count, thread,
                               Convert<Buffer, Tensor, kScaled>{scale});
  }
}

}  // namespace tfdist

#endif  // TFDIST_OPS_CUDA_PACK_TILE_H_
