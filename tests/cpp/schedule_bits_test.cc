// The bits of a reduction, with numbers whose sums round: they depend not on the order in which
// things happen, not on segments, not on what else is in the bucket; and half types are rounded
// once.
#include <cmath>
#include <cstring>
#include <string>

#include "check.h"
#include "settings.h"

namespace tfdist {
namespace {

TEST(many_interleavings_give_the_same_bits_on_all_ranks) {
  ForEachRow(CollectiveKind::kAllreduce, [](Setting s) {
    if (s.size != 4 && s.size != 7) return;
    s.lengths = {1031, 5, 290};
    s.value = Rough;
    Bytes first;
    for (uint64_t seed = 1; seed < 100; ++seed) {
      s.seed = seed;
      s.in_place = seed % 3 == 0;
      s.read_late = seed % 2 == 0;
      s.segment_bytes = seed % 5 == 0 ? 64 : seed % 5 == 1 ? 100000 : 256;
      Planned planned(s);
      planned.Run();
      if (first.empty()) first = planned.Output(0, 0);
      for (int rank = 0; rank < s.size; ++rank) {
        CHECK_EQ_IN(planned.Output(rank, 0) == first, true, s.Name());
      }
    }
  });
}

TEST(tensors_in_one_bucket_get_the_bits_they_get_alone) {
  for (CollectiveKind kind : {CollectiveKind::kAllreduce, CollectiveKind::kReduce}) {
    ForEachRow(kind, [](Setting s) {
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kFloat64}) {
        s.dtype = dtype;
        s.lengths = {5, 700, 0, 1, 333, 64, 31};
        s.hints = {9, 8, 7, 6, 5, 4, 3};
        s.value = Rough;
        Planned fused(s);
        fused.Run();
        for (size_t t = 0; t < s.lengths.size(); ++t) {
          Setting alone = s;
          alone.lengths = {s.lengths[t]};
          alone.hints = {s.hints[t]};
          alone.value = [t](int rank, size_t, int64_t i) { return Rough(rank, t, i); };
          Planned one(alone);
          one.Run();
          CHECK_EQ_IN(one.Output(0, 0) == fused.Output(0, t), true, alone.Name());
        }
      }
    });
  }
}

// The same schedule in float32, on what the half type made of the numbers, then rounded: half types
// are accumulated in float32 however many ranks a partial result passes.
TEST(half_types_are_rounded_once_by_every_algorithm) {
  for (CollectiveKind kind :
       {CollectiveKind::kAllreduce, CollectiveKind::kReduce, CollectiveKind::kReduceScatter}) {
    ForEachRow(kind, [](Setting s) {
      for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
        const bool f16 = dtype == DType::kFloat16;
        const auto narrow = [f16](double v) {
          const auto f = static_cast<float>(v);
          return f16 ? FloatToHalf(f) : FloatToBfloat16(f);
        };
        s.dtype = dtype;
        s.op = ReduceOp::kAverage;
        s.prescale = 1.0 / 3.0;
        s.lengths = {64 * s.size * 3};  // cut at the same elements in both types
        s.rows = RaggedRows(s.size, 64, 1);
        s.value = Rough;
        Setting wide = s;
        wide.dtype = DType::kFloat32;
        wide.value = [&](int rank, size_t t, int64_t i) -> Element {
          const uint16_t bits = narrow(Rough(rank, t, i).real());
          return f16 ? HalfToFloat(bits) : Bfloat16ToFloat(bits);
        };
        Planned half(s);
        Planned single(wide);
        half.Run();
        single.Run();
        const Bytes got = half.Output(0, 0);
        const Bytes sums = single.Output(0, 0);
        for (size_t i = 0; i < got.size() / 2; ++i) {
          uint16_t bits;
          float sum;
          std::memcpy(&bits, got.data() + 2 * i, 2);
          std::memcpy(&sum, sums.data() + 4 * i, 4);
          if (bits != narrow(sum)) CHECK_EQ_IN(bits, narrow(sum), s.Name());
        }
      }
    });
  }
}

// Where one rank reads all inputs they are added in the order of ranks, wherever it stands itself.
TEST(owners_of_all_inputs_add_in_rank_order) {
  for (CollectiveKind kind : {CollectiveKind::kAllreduce, CollectiveKind::kReduce}) {
    ForEachRow(kind, [](Setting s) {
      const std::string name = s.entry->name;
      if (name != "pairwise" && name != "star") return;
      s.lengths = {1031};
      s.root = HasRoot(s.kind()) ? s.size / 2 : 0;
      s.value = Rough;
      Planned planned(s);
      planned.Run();
      const Bytes output = planned.Output(s.root, 0);
      for (int64_t i = 0; i < 1031; ++i) {
        auto sum = static_cast<float>(Rough(0, 0, i).real());
        for (int rank = 1; rank < s.size; ++rank) {
          sum += static_cast<float>(Rough(rank, 0, i).real());
        }
        float got;
        std::memcpy(&got, output.data() + 4 * i, 4);
        if (got != sum) CHECK_EQ_IN(got, sum, s.Name());
      }
    });
  }
}

TEST(rounded_sums_are_near_the_exact_ones) {
  ForEachRow(CollectiveKind::kAllreduce, [](Setting s) {
    s.lengths = {501};
    s.value = Rough;
    Planned planned(s);
    planned.Run();
    const Bytes output = planned.Output(s.size - 1, 0);
    for (int64_t i = 0; i < 501; ++i) {
      double sum = 0;
      double size = 0;
      for (int rank = 0; rank < s.size; ++rank) {
        const double v = static_cast<float>(Rough(rank, 0, i).real());
        sum += v;
        size += std::abs(v);
      }
      float got;
      std::memcpy(&got, output.data() + 4 * i, 4);
      if (std::abs(got - sum) > size * s.size * 6e-8) CHECK_EQ_IN(got, sum, s.Name());
    }
  });
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
