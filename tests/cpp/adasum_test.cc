// Allreduce by Adasum: the rule for two vectors, and all ranks in one thread against a tree that is
// computed in float64.
#include "collective/adasum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "elements.h"
#include "planned.h"
#include "schedule_runner.h"
#include "scheduler/operation_plan.h"

namespace tfdist {
namespace {

using Vector = std::vector<double>;

Vector Adasum(const Vector& a, const Vector& b) {
  Dots dots;
  for (size_t i = 0; i < a.size(); ++i) {
    dots.ab += a[i] * b[i];
    dots.aa += a[i] * a[i];
    dots.bb += b[i] * b[i];
  }
  const PairFactors factors = FactorsOf(dots);
  Vector out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = factors.a * a[i] + factors.b * b[i];
  return out;
}

// Neighbours become one, until one is left.
Vector Tree(std::vector<Vector> vectors) {
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (size_t i = 0; i < vectors.size(); i += 2) {
      next.push_back(Adasum(vectors[i], vectors[i + 1]));
    }
    vectors = next;
  }
  return vectors[0];
}

struct Job {
  int size = 2;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> lengths;
  std::vector<uint64_t> hints;
  double prescale = 1;
  double postscale = 1;
  bool in_place = false;
  bool read_late = false;
  uint64_t seed = 1;
  std::vector<std::vector<Vector>> values = {};  // by rank and tensor

  void Draw() {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (int rank = 0; rank < size; ++rank) {
      std::vector<Vector>& own = values.emplace_back();
      for (int64_t n : lengths) {
        Vector& vector = own.emplace_back();
        for (int64_t i = 0; i < n; ++i) vector.push_back(Rounded(normal(random)));
      }
    }
  }
  double Rounded(double value) const;
};

double Load(DType dtype, const uint8_t* at) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBfloat16: {
      uint16_t bits;
      std::memcpy(&bits, at, sizeof(bits));
      return static_cast<double>(dtype == DType::kFloat16 ? HalfToFloat(bits)
                                                          : Bfloat16ToFloat(bits));
    }
    case DType::kFloat32: {
      float value;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<double>(value);
    }
    default: {
      double value;
      std::memcpy(&value, at, sizeof(value));
      return value;
    }
  }
}

double Job::Rounded(double value) const {
  uint8_t bytes[16];
  StoreElement(dtype, value, bytes);
  return Load(dtype, bytes);
}

// The results of all ranks, which it compares; `counts`: what rank 0 sent, and should have sent.
Buffer Run(const Job& job, SendCount* sent = nullptr, SendCount* counted = nullptr) {
  std::vector<Schedule> schedules;
  std::vector<std::vector<Slice>> slices;
  std::vector<Buffer> inputs, outputs;
  for (int rank = 0; rank < job.size; ++rank) {
    inputs.emplace_back(job.lengths, job.dtype);
    outputs.emplace_back(job.lengths, job.dtype);
  }
  RequestInfo info;
  info.key = "adasum";
  info.kind = CollectiveKind::kAllreduce;
  info.dtype = job.dtype;
  info.op = ReduceOp::kAdasum;
  for (int64_t n : job.lengths) info.shapes.push_back({n});
  SetView set;
  for (int rank = 0; rank < job.size; ++rank) set.ranks.push_back(rank);
  Config config;
  config.allreduce_algorithm = "ring";  // is for other operations
  for (int rank = 0; rank < job.size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    std::vector<TensorView> views;
    for (size_t t = 0; t < job.lengths.size(); ++t) {
      Buffer& input = job.in_place ? outputs[r] : inputs[r];
      for (int64_t i = 0; i < job.lengths[t]; ++i) {
        StoreElement(job.dtype, job.values[r][t][static_cast<size_t>(i)],
                     input.At(t, i, job.dtype));
      }
      views.push_back({input.At(t, 0, job.dtype), outputs[r].At(t, 0, job.dtype), job.lengths[t],
                       job.hints.empty() ? t : job.hints[t]});
    }
    set.index = rank;
    StatusOr<Plan> plan = PlanOperation({info, views, {}, set}, config);
    CHECK_OK(plan.status());
    schedules.push_back(plan.value().schedule);
    slices.push_back(plan.value().slices);
  }
  RunnerOptions options;
  options.reduction.dtype = job.dtype;
  options.reduction.prescale = job.prescale;
  options.reduction.finish.multiply = job.postscale;
  options.seed = job.seed;
  options.read_late = job.read_late;
  std::vector<int64_t> elements;
  for (const Slice& slice : slices[0]) elements.push_back(slice.elements);
  const auto tensors =
      std::count_if(job.lengths.begin(), job.lengths.end(), [](int64_t n) { return n > 0; });
  if (counted != nullptr) {
    *counted = CountSends(schedules[0], elements, job.dtype, options.segment_bytes,
                          static_cast<int>(tensors));
  }
  ScheduleRunner runner(schedules, slices, options);
  CHECK_EQ(runner.Run(), "");
  if (sent != nullptr) *sent = runner.count(0);
  for (int rank = 1; rank < job.size; ++rank) {
    CHECK(outputs[static_cast<size_t>(rank)].bytes == outputs[0].bytes);
  }
  return outputs[0];
}

Vector Result(const Job& job, Buffer* buffer, size_t tensor) {
  Vector out;
  for (int64_t i = 0; i < job.lengths[tensor]; ++i) {
    out.push_back(Load(job.dtype, buffer->At(tensor, i, job.dtype)));
  }
  return out;
}

void ExpectClose(const Job& job, Buffer* buffer, double tolerance) {
  for (size_t t = 0; t < job.lengths.size(); ++t) {
    std::vector<Vector> scaled;
    for (const auto& own : job.values) {
      scaled.push_back(own[t]);
      for (double& value : scaled.back()) value *= job.prescale;
    }
    const Vector wanted = Tree(scaled);
    const Vector found = Result(job, buffer, t);
    double norm = 1e-30;
    for (double value : wanted) norm = std::max(norm, std::abs(value * job.postscale));
    for (size_t i = 0; i < found.size(); ++i) {
      const double error = std::abs(found[i] - wanted[i] * job.postscale) / norm;
      CHECK_EQ_IN(error <= tolerance, true,
                  std::string(DTypeName(job.dtype)) + ", " + std::to_string(job.size) +
                      " ranks, tensor " + std::to_string(t) + ": error " + std::to_string(error));
    }
  }
}

TEST(orthogonal_vectors_are_added_and_equal_ones_averaged) {
  CHECK(Adasum({1, 0, 2}, {0, 5, 0}) == Vector({1, 5, 2}));
  CHECK(Adasum({1, -2, 3}, {1, -2, 3}) == Vector({1, -2, 3}));
  CHECK(Adasum({1, 2}, {3, 6}) == Vector({2, 4}));
  CHECK(Adasum({1, 2}, {-1, -2}) == Vector({0, 0}));
  CHECK(Adasum({0, 0}, {3, 4}) == Vector({3, 4}));
  const Vector spoilt = Adasum({NAN, 1}, {1, 2});
  CHECK(std::isnan(spoilt[0]) && std::isnan(spoilt[1]));
}

TEST(dots_and_sums_of_vectors_of_any_length_and_place) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  for (int64_t n : {0, 1, 7, 8, 9, 16, 100}) {
    for (size_t shift : {0u, 1u, 3u}) {
      std::vector<uint8_t> a(static_cast<size_t>(n) * 4 + shift), b(a.size());
      Vector x, y;
      for (int64_t i = 0; i < n; ++i) {
        x.push_back(static_cast<double>(static_cast<float>(normal(random))));
        y.push_back(static_cast<double>(static_cast<float>(normal(random))));
        StoreElement(DType::kFloat32, x.back(), a.data() + shift + 4 * static_cast<size_t>(i));
        StoreElement(DType::kFloat32, y.back(), b.data() + shift + 4 * static_cast<size_t>(i));
      }
      const Dots dots = DotsOf(DType::kFloat32, a.data() + shift, b.data() + shift, n);
      Dots wanted;
      for (size_t i = 0; i < x.size(); ++i) {
        wanted.ab += x[i] * y[i];
        wanted.aa += x[i] * x[i];
        wanted.bb += y[i] * y[i];
      }
      CHECK(std::abs(dots.ab - wanted.ab) < 1e-12 && std::abs(dots.aa - wanted.aa) < 1e-12 &&
            std::abs(dots.bb - wanted.bb) < 1e-12);
      AddPair(DType::kFloat32, {0.5, -2}, a.data() + shift, b.data() + shift, n);
      for (size_t i = 0; i < x.size(); ++i) {
        CHECK_EQ(Load(DType::kFloat32, a.data() + shift + 4 * i),
                 static_cast<double>(static_cast<float>(0.5 * x[i] - 2 * y[i])));
      }
    }
  }
}

TEST(halving_and_doubling_gives_the_result_of_the_tree) {
  uint64_t seed = 0;
  for (int size : {1, 2, 4, 8, 16}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16}) {
      for (bool in_place : {false, true}) {
        Job job;
        job.size = size;
        job.dtype = dtype;
        job.lengths = {1, 0, 37, 1000, 5, 300};
        job.in_place = in_place;
        job.seed = ++seed;
        job.read_late = seed % 3 == 0;
        if (seed % 4 == 0) {
          job.prescale = 0.5;
          job.postscale = -3;
        }
        job.Draw();
        SendCount sent, counted;
        Buffer result = Run(job, &sent, &counted);
        const double tolerance = dtype == DType::kFloat64   ? 1e-14
                                 : dtype == DType::kFloat32 ? 1e-6
                                 : dtype == DType::kFloat16 ? 1e-3
                                                            : 8e-3;
        ExpectClose(job, &result, tolerance);
        CHECK_EQ(sent.bytes, counted.bytes);
        CHECK_EQ(sent.frames, counted.frames);
      }
    }
  }
}

// Each tensor is a layer of its own: its factors follow from it alone.
TEST(what_a_tensor_is_fused_with_does_not_change_its_bits) {
  for (int size : {2, 4, 8}) {
    Job both;
    both.size = size;
    both.lengths = {1000, 3, 517};
    both.hints = {5, 6, 7};
    both.seed = static_cast<uint64_t>(size);
    both.Draw();
    Buffer fused = Run(both);
    for (size_t t = 0; t < both.lengths.size(); ++t) {
      Job alone = both;
      alone.lengths = {both.lengths[t]};
      alone.hints = {both.hints[t]};
      for (auto& own : alone.values) own = {own[t]};
      alone.seed = both.seed + 100;
      Buffer result = Run(alone);
      CHECK(Result(both, &fused, t) == Result(alone, &result, 0));
    }
  }
}

TEST(dots_of_many_tensors_travel_in_several_segments) {
  Job job;
  job.size = 4;
  job.lengths.assign(25, 7);  // a segment has room for 10
  job.lengths[3] = 0;
  job.Draw();
  SendCount sent, counted;
  Buffer result = Run(job, &sent, &counted);
  ExpectClose(job, &result, 1e-6);
  CHECK_EQ(sent.bytes, counted.bytes);
  CHECK_EQ(sent.frames, counted.frames);
}

TEST(empty_tensors_alone_take_no_messages) {
  Job job;
  job.size = 4;
  job.lengths = {0, 0};
  job.Draw();
  SendCount sent;
  Run(job, &sent);
  CHECK_EQ(sent.frames, uint64_t{0});
}

TEST(numbers_of_ranks_that_are_no_power_of_two_have_no_plan) {
  CHECK(!AdasumAllreduce().supports({0, 3, 0, {}}, DType::kFloat32));
  CHECK(AdasumAllreduce().supports({0, 4, 0, {}}, DType::kFloat32));
  CHECK(!AdasumAllreduce().supports({0, 4, 0, {}}, DType::kInt32));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
