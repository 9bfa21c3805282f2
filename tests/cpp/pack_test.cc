// The pack kernels' plan and loops, run on the host: every block and thread of a launch in turn.
// Tests that need a GPU (the launch, the device's rounding) are in tests/gpu and `make gpu`.
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "cuda/pack_table.h"
#include "cuda/pack_tile.h"

using tfdist::Bfloat16;
using tfdist::Half;
using tfdist::PackTable;
using tfdist::PackTensor;

namespace {

const std::vector<int64_t> kSizes = {0, 1, 3, 4, 7, 8, 255, 0, 4095, 4096, 4097, 8193, 20001, 0};

template <typename T>
T Value(int64_t i) {
  if constexpr (std::is_same_v<T, Half>) return Half{static_cast<uint16_t>(i * 7919)};
  if constexpr (std::is_same_v<T, Bfloat16>) return Bfloat16{static_cast<uint16_t>(i * 7919)};
  if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(i * 3 - 1000);
}

template <typename T>
bool SameBits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename Tensor, typename Buffer, bool kPack, bool kScaled>
void RunOnHost(const std::vector<PackTensor>& tensors, void* buffer, double scale) {
  constexpr int64_t kTile = tfdist::PackTileElements(sizeof(Tensor), sizeof(Buffer));
  for (const PackTable& table : tfdist::PlanPack(
           tensors.data(), static_cast<int64_t>(tensors.size()), buffer, sizeof(Tensor), kTile)) {
    for (int32_t block = 0; block < table.first_block[table.count]; ++block) {
      for (int thread = 0; thread < tfdist::kPackThreads; ++thread) {
        tfdist::RunPackBlock<Tensor, Buffer, kPack, kScaled>(table, block, thread, scale);
      }
    }
  }
}

// Packs and unpacks tensors of `sizes`, each `shift` elements off a 16-byte boundary, with a gap of
// one element after each in the buffer; compares with a plain loop.
template <typename Tensor, typename Buffer, bool kScaled>
void CheckRoundTrip(const std::vector<int64_t>& sizes, int64_t shift, double scale) {
  const tfdist::Convert<Tensor, Buffer, kScaled> to_buffer{scale};
  const tfdist::Convert<Buffer, Tensor, kScaled> to_tensor{scale};
  std::vector<std::vector<Tensor>> memory;
  std::vector<PackTensor> tensors;
  int64_t end = shift;
  for (int64_t size : sizes) {
    memory.emplace_back(static_cast<size_t>(size + shift + 1));
    for (int64_t i = 0; i < size; ++i) memory.back()[i + shift] = Value<Tensor>(end + i);
    tensors.push_back({memory.back().data() + shift, size, end});
    end += size + 1;
  }
  std::vector<Buffer> buffer(static_cast<size_t>(end), Value<Buffer>(1));
  std::vector<Buffer> expected = buffer;
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t i = 0; i < sizes[t]; ++i) {
      expected[tensors[t].offset + i] = to_buffer(memory[t][i + shift]);
    }
  }
  RunOnHost<Tensor, Buffer, true, kScaled>(tensors, buffer.data(), scale);
  for (size_t i = 0; i < expected.size(); ++i) CHECK(SameBits(buffer[i], expected[i]));

  for (auto& tensor : memory) std::fill(tensor.begin(), tensor.end(), Value<Tensor>(2));
  RunOnHost<Tensor, Buffer, false, kScaled>(tensors, buffer.data(), scale);
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t i = 0; i < sizes[t]; ++i) {
      CHECK(SameBits(memory[t][i + shift], to_tensor(expected[tensors[t].offset + i])));
    }
    CHECK(SameBits(memory[t].back(), Value<Tensor>(2)));
    if (shift > 0) CHECK(SameBits(memory[t].front(), Value<Tensor>(2)));
  }
}

template <typename Tensor, typename Buffer>
void CheckPair() {
  for (int64_t shift : {0, 1}) {
    CheckRoundTrip<Tensor, Buffer, false>(kSizes, shift, 1.0);
    if constexpr (!std::is_integral_v<Tensor>) {
      CheckRoundTrip<Tensor, Buffer, true>(kSizes, shift, 1.0 / 3);
    }
  }
}

}  // namespace

TEST(equal_types_are_copied_or_scaled) {
  CheckPair<float, float>();
  CheckPair<double, double>();
  CheckPair<Half, Half>();
  CheckPair<Bfloat16, Bfloat16>();
  CheckPair<int32_t, int32_t>();
  CheckPair<int64_t, int64_t>();
}

TEST(float_types_are_cast_with_one_rounding) {
  CheckPair<float, Half>();
  CheckPair<float, Bfloat16>();
  CheckPair<Half, float>();
  CheckPair<Half, Bfloat16>();
  CheckPair<Bfloat16, float>();
  CheckPair<Bfloat16, Half>();
  // 1 + 2^-11 lies between two halves; scaled by 3 it must be rounded after the product.
  const tfdist::Convert<float, Half, true> triple{3.0};
  CHECK_EQ(triple(1.0f + 0x1p-11f).bits, tfdist::FloatToHalf(3.0f + 3 * 0x1p-11f));
}

TEST(a_copy_keeps_the_bits_of_a_nan) {
  const tfdist::Convert<Half, Half, false> copy{1.0};
  CHECK_EQ(copy(Half{0x7d01}).bits, uint16_t{0x7d01});
}

TEST(more_tensors_than_a_launch_holds_become_several_launches) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < 700; ++i) sizes.push_back(i * 37 % 300);
  CheckRoundTrip<float, Half, true>(sizes, 0, 0.25);
  const std::vector<PackTensor> tensors(300, PackTensor{nullptr, 5, 0});
  CHECK_EQ(tfdist::PlanPack(tensors.data(), 300, nullptr, 4, 4096).size(), size_t{3});
}

TEST(nothing_to_move_is_no_launch) {
  const std::vector<PackTensor> tensors(3, PackTensor{nullptr, 0, 0});
  CHECK_EQ(tfdist::PlanPack(tensors.data(), 3, nullptr, 4, 4096).size(), size_t{0});
  CHECK_EQ(tfdist::PlanPack(nullptr, 0, nullptr, 4, 4096).size(), size_t{0});
}

TEST(a_tensor_of_more_blocks_than_a_launch_is_cut_at_a_tile) {
  // A tile of one element, so that 2^30 blocks are passed without memory behind them.
  constexpr int64_t kElements = (int64_t{1} << 30) + 5;
  uint8_t* const data = nullptr;
  const PackTensor tensors[] = {{data, 3, 7}, {data, kElements, 100}};
  const std::vector<PackTable> launches = tfdist::PlanPack(tensors, 2, nullptr, 4, 1);
  CHECK_EQ(launches.size(), size_t{2});
  CHECK_EQ(launches[0].count, 2);
  CHECK_EQ(launches[0].elements[1], (int64_t{1} << 30) - 3);
  CHECK_EQ(launches[0].first_block[2], int32_t{1} << 30);
  CHECK_EQ(launches[1].elements[0], int64_t{8});
  CHECK_EQ(launches[1].offset[0], 100 + (int64_t{1} << 30) - 3);
  CHECK_EQ(launches[1].data[0] - data, 4 * ((int64_t{1} << 30) - 3));
}

TEST(every_block_finds_its_tensor) {
  const int64_t sizes[] = {0, 10, 0, 0, 4097, 1, 0};
  std::vector<PackTensor> tensors;
  for (int64_t size : sizes) tensors.push_back({nullptr, size, 0});
  const PackTable table = tfdist::PlanPack(tensors.data(), 7, nullptr, 4, 4096)[0];
  CHECK_EQ(table.count, 3);
  CHECK_EQ(tfdist::FindPackTensor(table, 0), 0);
  CHECK_EQ(tfdist::FindPackTensor(table, 1), 1);
  CHECK_EQ(tfdist::FindPackTensor(table, 2), 1);
  CHECK_EQ(tfdist::FindPackTensor(table, 3), 2);
}

TEST_MAIN()
