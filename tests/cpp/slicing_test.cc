// Slicing: parts of tensors, slices over several tensors, segments, cursors.
#include "collective/slicing.h"

#include <random>
#include <vector>

#include "check.h"

namespace tfdist {
namespace {

std::string Where(int64_t elements, size_t bytes, int size) {
  return std::to_string(elements) + " elements of " + std::to_string(bytes) + " bytes, size " +
         std::to_string(size);
}

TEST(parts_cover_a_tensor_evenly_in_blocks_of_64_bytes) {
  for (size_t bytes : {1u, 2u, 4u, 8u, 16u}) {
    const int64_t block = 64 / static_cast<int64_t>(bytes);
    for (int size : {1, 2, 3, 4, 7, 8}) {
      for (int64_t elements :
           {block * size, block * size + 1, block * size * 3 - 1, int64_t{4099}, int64_t{100003}}) {
        if (elements < block * size) continue;
        const std::string where = Where(elements, bytes, size);
        int64_t least = elements;
        int64_t most = 0;
        CHECK_EQ_IN(PartBegin(elements, bytes, size, 5, 0), 0, where);
        CHECK_EQ_IN(PartBegin(elements, bytes, size, 5, size), elements, where);
        for (int part = 0; part < size; ++part) {
          const int64_t begin = PartBegin(elements, bytes, size, 5, part);
          const int64_t length = PartBegin(elements, bytes, size, 5, part + 1) - begin;
          CHECK_EQ_IN(begin % block, 0, where);
          least = std::min(least, length);
          most = std::max(most, length);
        }
        CHECK(least >= 1);
        CHECK(most - least <= block + block - 1);  // one block, and what the last one lacks
      }
    }
  }
}

TEST(a_small_tensor_goes_whole_to_the_part_its_hint_names) {
  for (int size : {1, 2, 3, 8}) {
    for (int64_t elements : {int64_t{1}, int64_t{16 * size - 1}}) {
      for (uint64_t hint : {uint64_t{0}, uint64_t{5}, ~uint64_t{0}}) {
        for (int part = 0; part < size; ++part) {
          const int64_t length = PartBegin(elements, 4, size, hint, part + 1) -
                                 PartBegin(elements, 4, size, hint, part);
          const bool owner = static_cast<uint64_t>(part) == hint % static_cast<uint64_t>(size);
          CHECK_EQ_IN(length, owner ? elements : 0, Where(elements, 4, size));
        }
      }
    }
  }
  CHECK_EQ(PartBegin(16 * 3, 4, 3, 1, 1), 16);  // 64 * size bytes: cut
}

TEST(an_empty_tensor_has_empty_parts) {
  for (int part = 0; part <= 4; ++part) CHECK_EQ(PartBegin(0, 4, 4, 2, part), 0);
}

TEST(allreduce_slices_hold_each_tensors_own_parts) {
  std::vector<uint8_t> in(8000);
  std::vector<uint8_t> out(8000);
  const std::vector<TensorView> tensors = {{in.data(), out.data(), 1000, 0},
                                           {in.data() + 4000, out.data() + 4000, 7, 4},
                                           {in.data() + 4100, out.data() + 4100, 0, 1},
                                           {in.data() + 5000, out.data() + 5000, 300, 2}};
  const std::vector<Slice> slices = CutAllreduce(tensors, 4, 3);
  CHECK_EQ(slices.size(), 3u);
  std::vector<int> seen(2000, 0);
  for (int s = 0; s < 3; ++s) {
    int64_t sum = 0;
    for (const Extent& e : slices[s].extents) {
      CHECK(e.elements > 0);
      CHECK_EQ(e.input - in.data(), e.output - out.data());
      const int64_t at = (e.input - in.data()) / 4;
      for (int64_t i = 0; i < e.elements; ++i) ++seen[static_cast<size_t>(at + i)];
      sum += e.elements;
    }
    CHECK_EQ(slices[s].elements, sum);
    CHECK_EQ(slices[s].extents.size(), s == 1 ? 3u : 2u);  // the small tensor: 4 mod 3 = 1
    // The same part as when the tensor is cut alone.
    const std::vector<Slice> alone = CutAllreduce({tensors[3]}, 4, 3);
    CHECK_EQ(slices[s].extents.back().input, alone[s].extents[0].input);
    CHECK_EQ(slices[s].extents.back().elements, alone[s].extents[0].elements);
  }
  for (int64_t i = 0; i < 2000; ++i) {
    const bool inside = i < 1007 || (i >= 1250 && i < 1550);
    CHECK_EQ_IN(seen[static_cast<size_t>(i)], inside ? 1 : 0, std::to_string(i));
  }
}

TEST(allgather_slices_lie_at_the_ranks_places) {
  uint8_t in[24];
  uint8_t out[80];
  const std::vector<Slice> slices = CutAllgather({in, out, 3, 0}, 8, {2, 0, 3, 5}, 2);
  CHECK_EQ(slices.size(), 4u);
  CHECK(slices[1].extents.empty());
  CHECK_EQ(slices[1].elements, 0);
  CHECK_EQ(slices[0].extents[0].output - out, 0);
  CHECK_EQ(slices[2].extents[0].output - out, 16);
  CHECK_EQ(slices[3].extents[0].output - out, 40);
  CHECK_EQ(slices[3].elements, 5);
  CHECK(slices[2].extents[0].input == in);
  CHECK(slices[0].extents[0].input == nullptr && slices[3].extents[0].input == nullptr);
}

TEST(broadcast_has_one_slice_and_only_the_root_an_input) {
  uint8_t in[100];
  uint8_t out[100];
  const std::vector<TensorView> tensors = {
      {in, out, 3, 0}, {in, out, 0, 0}, {in + 9, out + 9, 4, 0}};
  const std::vector<Slice> root = CutWhole(tensors, true);
  const std::vector<Slice> other = CutWhole(tensors, false);
  CHECK_EQ(root.size(), 1u);
  CHECK_EQ(root[0].elements, 7);
  CHECK_EQ(root[0].extents.size(), 2u);
  CHECK(root[0].extents[1].input == in + 9 && root[0].extents[1].output == out + 9);
  CHECK(other[0].extents[0].input == nullptr && other[0].extents[1].input == nullptr);
  CHECK(other[0].extents[1].output == out + 9);
}

TEST(segments_are_multiples_of_64_bytes) {
  CHECK_EQ(SegmentElements(256, 4), 64);
  CHECK_EQ(SegmentElements(255, 4), 48);
  CHECK_EQ(SegmentElements(1, 4), 16);
  CHECK_EQ(SegmentElements(0, 8), 8);
  CHECK_EQ(SegmentElements(262144, 2), 131072);
  CHECK_EQ(SegmentCount(0, 64), 0);
  CHECK_EQ(SegmentCount(1, 64), 1);
  CHECK_EQ(SegmentCount(64, 64), 1);
  CHECK_EQ(SegmentCount(65, 64), 2);
}

TEST(a_cursor_visits_every_byte_of_a_range_once_in_order) {
  uint8_t memory[4096];
  Slice slice;
  std::vector<const uint8_t*> expected;  // by element
  std::mt19937 random(3);
  for (int64_t i = 0, at = 0; i < 20; ++i) {
    const int64_t n = 1 + static_cast<int64_t>(random() % 30);
    slice.extents.push_back({memory + at, memory + at + 2048, n});
    for (int64_t k = 0; k < n; ++k) expected.push_back(memory + at + 2 * k);
    slice.elements += n;
    at += 2 * n + 3;
  }
  SliceCursor cursor(slice);  // one cursor, also jumping back
  for (int round = 0; round < 500; ++round) {
    const int64_t begin = static_cast<int64_t>(random()) % slice.elements;
    const int64_t count = 1 + static_cast<int64_t>(random()) % (slice.elements - begin);
    int64_t next = 0;
    cursor.ForEachRun(begin, count, 2, [&](const uint8_t* in, uint8_t* out, int64_t n, int64_t at) {
      CHECK_EQ(at, next);
      CHECK(n > 0);
      CHECK_EQ(out - in, 2048);
      for (int64_t k = 0; k < n; ++k) {
        CHECK(in + 2 * k == expected[static_cast<size_t>(begin + at + k)]);
      }
      next += n;
    });
    CHECK_EQ(next, count);
  }
}

TEST(a_cursor_accepts_an_empty_range) {
  const Slice empty;
  bool called = false;
  SliceCursor(empty).ForEachRun(0, 0, 4,
                                [&](const uint8_t*, uint8_t*, int64_t, int64_t) { called = true; });
  CHECK(!called);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
