// Schedules of every row of the algorithm table, all ranks in one thread in random order.
#include "collective/schedule.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "schedule_runner.h"

namespace tfdist {
namespace {

using Bytes = std::vector<uint8_t>;

const int kSizes[] = {1, 2, 3, 4, 7, 8};
const DType kTypes[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                        DType::kBfloat16, DType::kInt32,   DType::kInt64};
const ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax};
constexpr int64_t kSegmentBytes = 256;
constexpr uint8_t kGuard = 0xa5;

// {0, 1, size-1, size, size+1, odd, > one segment}, and the border where tensors begin to be cut.
std::vector<int64_t> Lengths(int size, DType dtype) {
  const int64_t cut = 64 / static_cast<int64_t>(DTypeSize(dtype)) * size;
  return {0, 1, size - 1, size, size + 1, 37, cut - 1, cut, 2 * cut + 5, 1031};
}

// Small integers: sums are exact in every type, so that any order of additions gives them.
double Value(int rank, int64_t i) { return static_cast<double>((rank * 7 + i * 5) % 17) - 8; }

void Store(DType dtype, double value, uint8_t* at) {
  const float f = static_cast<float>(value);
  const int32_t i32 = static_cast<int32_t>(value);
  const int64_t i64 = static_cast<int64_t>(value);
  const uint16_t half = dtype == DType::kFloat16 ? FloatToHalf(f) : FloatToBfloat16(f);
  const void* source = dtype == DType::kFloat32   ? static_cast<const void*>(&f)
                       : dtype == DType::kFloat64 ? static_cast<const void*>(&value)
                       : dtype == DType::kInt32   ? static_cast<const void*>(&i32)
                       : dtype == DType::kInt64   ? static_cast<const void*>(&i64)
                                                  : static_cast<const void*>(&half);
  std::memcpy(at, source, DTypeSize(dtype));
}

// The buffers of one rank for several tensors; guards lie between and around them.
struct RankBuffers {
  Bytes input;
  Bytes output;
  std::vector<size_t> begins;
  std::vector<TensorView> views;
};

struct Setting {
  const AlgorithmEntry* entry = nullptr;
  int size = 1;
  int root = 0;
  bool in_place = false;
  RunnerOptions options;
  std::vector<int64_t> lengths;  // elements by tensor
  std::vector<uint64_t> hints;
  std::function<double(int rank, size_t tensor, int64_t i)> value = [](int rank, size_t tensor,
                                                                       int64_t i) {
    return Value(rank, i + static_cast<int64_t>(tensor));
  };

  std::string Name() const {
    std::string name = std::string(CollectiveKindName(entry->kind)) + " " + entry->name + " " +
                       DTypeName(options.dtype) + " " + ReduceOpName(options.op) + " on " +
                       std::to_string(size) + " ranks, root " + std::to_string(root) +
                       (in_place ? ", in place" : "") + (options.read_late ? ", late" : "") +
                       ", of";
    for (int64_t n : lengths) name += " " + std::to_string(n);
    return name;
  }
};

RankBuffers MakeBuffers(const Setting& s, int rank) {
  const size_t bytes = DTypeSize(s.options.dtype);
  RankBuffers b;
  size_t end = 64;
  for (int64_t n : s.lengths) {
    b.begins.push_back(end);
    end += static_cast<size_t>(n) * bytes + 64;
  }
  b.input.assign(end, kGuard);
  for (size_t t = 0; t < s.lengths.size(); ++t) {
    for (int64_t i = 0; i < s.lengths[t]; ++i) {
      Store(s.options.dtype, s.value(rank, t, i),
            b.input.data() + b.begins[t] + static_cast<size_t>(i) * bytes);
    }
  }
  b.output = s.in_place ? b.input : Bytes(end, kGuard);
  for (size_t t = 0; t < s.lengths.size(); ++t) {
    uint8_t* out = b.output.data() + b.begins[t];
    const uint8_t* in = s.in_place ? out : b.input.data() + b.begins[t];
    b.views.push_back({in, out, s.lengths[t], s.hints.empty() ? t : s.hints[t]});
  }
  return b;
}

std::vector<Schedule> MakeSchedules(const AlgorithmEntry& entry, int size, int root) {
  std::vector<Schedule> schedules;
  for (int rank = 0; rank < size; ++rank) schedules.push_back(entry.make({rank, size, root, {}}));
  return schedules;
}

// Runs over slices cut from `ranks`, checks the runner's counts against CountSends.
void RunSetting(const Setting& s, const std::vector<std::vector<Slice>>& slices) {
  const std::vector<Schedule> schedules = MakeSchedules(*s.entry, s.size, s.root);
  ScheduleRunner runner(schedules, slices, s.options);
  CHECK_EQ_IN(runner.Run(), "", s.Name());
  std::vector<uint64_t> bytes;
  for (const Slice& slice : slices[0]) {
    bytes.push_back(static_cast<uint64_t>(slice.elements) * DTypeSize(s.options.dtype));
  }
  for (int rank = 0; rank < s.size; ++rank) {
    const SendCount count = CountSends(schedules[static_cast<size_t>(rank)], bytes,
                                       static_cast<uint64_t>(s.options.segment_bytes));
    CHECK_EQ_IN(runner.count(rank).bytes, count.bytes, s.Name());
    CHECK_EQ_IN(runner.count(rank).frames, count.frames, s.Name());
  }
}

// Outputs, guards included, of an allreduce by rank.
std::vector<Bytes> RunAllreduce(const Setting& s) {
  std::vector<RankBuffers> ranks;
  std::vector<std::vector<Slice>> slices;
  for (int rank = 0; rank < s.size; ++rank) ranks.push_back(MakeBuffers(s, rank));
  for (const RankBuffers& b : ranks) {
    slices.push_back(CutAllreduce(b.views, DTypeSize(s.options.dtype), s.size));
  }
  const RankBuffers fresh = MakeBuffers(s, s.size - 1);
  RunSetting(s, slices);
  if (!s.in_place) CHECK(ranks.back().input == fresh.input);  // inputs are not written
  std::vector<Bytes> outputs;
  for (const RankBuffers& b : ranks) outputs.push_back(b.output);
  return outputs;
}

double Reference(const Setting& s, size_t tensor, int64_t i) {
  double total = s.value(0, tensor, i) * s.options.prescale;
  for (int rank = 1; rank < s.size; ++rank) {
    const double v = s.value(rank, tensor, i) * s.options.prescale;
    total = s.options.op == ReduceOp::kMin   ? std::min(total, v)
            : s.options.op == ReduceOp::kMax ? std::max(total, v)
                                             : total + v;
  }
  if (s.options.dtype == DType::kFloat64) {
    return total / static_cast<double>(s.options.finish.divide) * s.options.finish.multiply;
  }
  if (!IsFloating(s.options.dtype)) {
    return static_cast<double>(static_cast<int64_t>(total) / s.options.finish.divide);
  }
  return static_cast<float>(total) / static_cast<float>(s.options.finish.divide) *
         static_cast<float>(s.options.finish.multiply);
}

void ExpectAllreduce(const Setting& s) {
  const std::vector<Bytes> outputs = RunAllreduce(s);
  RankBuffers expected = MakeBuffers(s, 0);
  for (size_t t = 0; t < s.lengths.size(); ++t) {
    for (int64_t i = 0; i < s.lengths[t]; ++i) {
      Store(s.options.dtype, Reference(s, t, i),
            expected.input.data() + expected.begins[t] +
                static_cast<size_t>(i) * DTypeSize(s.options.dtype));
    }
  }
  for (const Bytes& output : outputs) CHECK_EQ_IN(output == expected.input, true, s.Name());
}

// Calls fn for every row of a kind, number of ranks and type that it supports.
void ForEachRow(CollectiveKind kind, const std::function<void(Setting)>& fn) {
  int rows = 0;
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != kind) continue;
    ++rows;
    for (int size : kSizes) {
      for (DType dtype : kTypes) {
        if (!entry.supports({0, size, 0, {}}, dtype)) continue;
        Setting s;
        s.entry = &entry;
        s.size = size;
        s.options.dtype = dtype;
        s.options.segment_bytes = kSegmentBytes;
        fn(s);
      }
    }
  }
  CHECK(rows > 0);
}

TEST(every_allreduce_gives_the_right_bits_on_all_ranks) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kAllreduce, [&](Setting s) {
    for (int64_t n : Lengths(s.size, s.options.dtype)) {
      for (ReduceOp op : kOps) {
        for (bool in_place : {false, true}) {
          s.lengths = {n};
          s.hints = {seed};  // the small ones wander over the slices
          s.in_place = in_place;
          s.options.op = op;
          s.options.finish.divide = op == ReduceOp::kAverage ? s.size : 1;
          s.options.seed = ++seed;
          s.options.read_late = seed % 3 == 0;
          ExpectAllreduce(s);
        }
      }
    }
  });
}

TEST(prescale_and_finish_reach_every_contribution_once) {
  ForEachRow(CollectiveKind::kAllreduce, [](Setting s) {
    if (!IsFloating(s.options.dtype)) return;
    s.lengths = {300, 3};
    for (ReduceOp op : kOps) {
      s.options.op = op;
      s.options.prescale = -0.5;  // turns minimum into maximum where it is forgotten
      s.options.finish = {op == ReduceOp::kAverage ? s.size : 1, 4.0};
      ExpectAllreduce(s);
    }
  });
}

TEST(many_interleavings_give_the_same_bits) {
  ForEachRow(CollectiveKind::kAllreduce, [](Setting s) {
    if (s.options.dtype != DType::kFloat32 || s.size != 4) return;
    s.lengths = {1031, 5, 290};
    s.in_place = true;
    s.value = [](int rank, size_t t, int64_t i) {  // rounding shows the order of additions
      return std::sin(static_cast<double>(i + 1) * (rank + 1)) * std::pow(10.0, rank + double(t));
    };
    const std::vector<Bytes> first = RunAllreduce(s);
    for (uint64_t seed = 2; seed < 100; ++seed) {
      s.options.seed = seed;
      s.options.read_late = seed % 2 == 0;
      s.options.segment_bytes = seed % 5 == 0 ? 64 : seed % 5 == 1 ? 100000 : kSegmentBytes;
      const std::vector<Bytes> again = RunAllreduce(s);
      for (const Bytes& output : again) CHECK_EQ_IN(output == first[0], true, s.Name());
    }
  });
}

TEST(tensors_in_one_bucket_get_the_bits_they_get_alone) {
  ForEachRow(CollectiveKind::kAllreduce, [](Setting s) {
    if (!IsFloating(s.options.dtype)) return;
    s.lengths = {5, 700, 0, 1, 333, 64, 31};
    s.hints = {9, 8, 7, 6, 5, 4, 3};
    const auto value = [](int rank, size_t t, int64_t i) {
      return std::sin(static_cast<double>(i * 31 + 7) * (rank + 1) + static_cast<double>(t)) * 100;
    };
    s.value = value;
    const RankBuffers layout = MakeBuffers(s, 0);
    const Bytes fused = RunAllreduce(s)[0];
    for (size_t t = 0; t < s.lengths.size(); ++t) {
      Setting alone = s;
      alone.lengths = {s.lengths[t]};
      alone.hints = {s.hints[t]};
      alone.value = [&](int rank, size_t, int64_t i) { return value(rank, t, i); };
      const Bytes output = RunAllreduce(alone)[0];
      const size_t bytes = static_cast<size_t>(s.lengths[t]) * DTypeSize(s.options.dtype);
      CHECK_EQ_IN(std::memcmp(output.data() + 64, fused.data() + layout.begins[t], bytes), 0,
                  s.Name());
    }
  });
}

TEST(half_types_equal_the_float32_sum_rounded_once) {
  ForEachRow(CollectiveKind::kAllreduce, [](Setting s) {
    if (!IsHalf(s.options.dtype)) return;
    s.lengths = {1031};
    s.value = [](int rank, size_t, int64_t i) {
      return std::sin(static_cast<double>(i + 1) * (rank + 1)) * std::pow(4.0, rank);
    };
    const bool f16 = s.options.dtype == DType::kFloat16;
    const auto narrow = [&](float v) { return f16 ? FloatToHalf(v) : FloatToBfloat16(v); };
    const auto widen = [&](uint16_t v) { return f16 ? HalfToFloat(v) : Bfloat16ToFloat(v); };
    const Bytes output = RunAllreduce(s)[0];
    for (int64_t i = 0; i < 1031; ++i) {
      float sum = widen(narrow(static_cast<float>(s.value(0, 0, i))));
      for (int rank = 1; rank < s.size; ++rank) {
        sum += widen(narrow(static_cast<float>(s.value(rank, 0, i))));
      }
      uint16_t got;
      std::memcpy(&got, output.data() + 64 + 2 * i, 2);
      CHECK_EQ_IN(got, narrow(sum), s.Name());
    }
  });
}

TEST(every_allgather_puts_each_ranks_rows_in_place) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kAllgather, [&](Setting s) {
    const size_t bytes = DTypeSize(s.options.dtype);
    for (int64_t n : Lengths(s.size, s.options.dtype)) {
      for (bool ragged : {false, true}) {
        for (bool in_place : {false, true}) {
          std::vector<int64_t> counts;
          int64_t total = 0;
          for (int r = 0; r < s.size; ++r) {
            counts.push_back(ragged ? n * (r % 3) / 2 : n);
            total += counts.back();
          }
          s.lengths = {total};
          s.in_place = false;  // for MakeBuffers: a whole result, which the ranks have parts of
          s.options.seed = ++seed;
          s.options.read_late = seed % 2 == 0;
          s.value = [](int, size_t, int64_t i) { return Value(3, i); };
          const Bytes whole = MakeBuffers(s, 0).input;
          std::vector<RankBuffers> ranks;
          std::vector<std::vector<Slice>> slices;
          for (int r = 0; r < s.size; ++r) ranks.push_back(MakeBuffers(s, r));
          size_t at = 64;
          for (int r = 0; r < s.size; ++r) {
            const size_t own = static_cast<size_t>(counts[r]) * bytes;
            if (in_place) std::memcpy(ranks[r].output.data() + at, whole.data() + at, own);
            TensorView view = ranks[r].views[0];
            view.input = (in_place ? ranks[r].output.data() : ranks[r].input.data()) + at;
            slices.push_back(CutAllgather(view, bytes, counts, r));
            at += own;
          }
          RunSetting(s, slices);
          for (const RankBuffers& b : ranks) CHECK_EQ_IN(b.output == whole, true, s.Name());
        }
      }
    }
  });
}

TEST(every_broadcast_gives_all_ranks_the_roots_tensors) {
  uint64_t seed = 0;
  ForEachRow(CollectiveKind::kBroadcast, [&](Setting s) {
    for (int64_t n : Lengths(s.size, s.options.dtype)) {
      for (s.root = 0; s.root < s.size; ++s.root) {
        s.lengths = {n, 3};
        s.in_place = ++seed % 2 == 0;
        s.options.seed = seed;
        s.options.read_late = seed % 3 == 0;
        std::vector<RankBuffers> ranks;
        std::vector<std::vector<Slice>> slices;
        for (int r = 0; r < s.size; ++r) ranks.push_back(MakeBuffers(s, r));
        for (int r = 0; r < s.size; ++r) {
          slices.push_back(CutBroadcast(ranks[r].views, r == s.root));
        }
        const Bytes expected = MakeBuffers(s, s.root).input;
        RunSetting(s, slices);
        for (const RankBuffers& b : ranks) CHECK_EQ_IN(b.output == expected, true, s.Name());
      }
    }
  });
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
