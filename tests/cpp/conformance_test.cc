// Every row of the algorithm, transport and reduction tables against a plain reference, through
// complete runtimes with threads as ranks. A new row is covered by being in its table.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "collective/schedule.h"
#include "ranks.h"

namespace tfdist {
namespace {

const std::vector<DType> kTypes = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                   DType::kBfloat16, DType::kInt32,   DType::kInt64};
const std::vector<ReduceOp> kOps = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                    ReduceOp::kMax};
const std::vector<int> kRanks = {1, 2, 3, 4, 7, 8};

// Small integers: exact in every type, and so are their sums.
int Value(int rank, int64_t i) { return static_cast<int>((i * 7 + rank * 13) % 23) - 11; }

void Write(DType dtype, std::vector<uint8_t>* buffer, int64_t i, double value) {
  uint8_t* at = buffer->data() + static_cast<size_t>(i) * DTypeSize(dtype);
  const auto f = static_cast<float>(value);
  const auto i32 = static_cast<int32_t>(value);
  const auto i64 = static_cast<int64_t>(value);
  const uint16_t half = dtype == DType::kFloat16 ? FloatToHalf(f) : FloatToBfloat16(f);
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(at, &f, 4);
      break;
    case DType::kFloat64:
      std::memcpy(at, &value, 8);
      break;
    case DType::kInt32:
      std::memcpy(at, &i32, 4);
      break;
    case DType::kInt64:
      std::memcpy(at, &i64, 8);
      break;
    default:
      std::memcpy(at, &half, 2);
      break;
  }
}

// What the reduction of element i over all ranks is, in the accumulation type, before rounding.
double Expected(DType dtype, ReduceOp op, int size, int64_t i) {
  double acc = Value(0, i);
  for (int r = 1; r < size; ++r) {
    const double v = Value(r, i);
    acc = op == ReduceOp::kMin   ? std::min(acc, v)
          : op == ReduceOp::kMax ? std::max(acc, v)
                                 : acc + v;
  }
  if (op != ReduceOp::kAverage) return acc;
  if (dtype == DType::kFloat64) return acc / size;
  if (!IsFloating(dtype)) return static_cast<double>(static_cast<int64_t>(acc) / size);
  return static_cast<double>(static_cast<float>(acc) / static_cast<float>(size));
}

// {0, 1, size-1, size, size+1, odd, more than one segment, more than the fusion threshold}.
std::vector<int64_t> Lengths(int size) {
  return {0, 1, size - 1, size, size + 1, 999, 9001, 70001};
}

Config AlgorithmConfig(const std::string& algorithm) {
  Config config = TestConfig();
  config.allreduce_algorithm = algorithm;
  config.fusion_bytes = 256 << 10;  // 70001 float32 are more
  return config;
}

struct Case {
  std::string name;
  DType dtype;
  ReduceOp op;
  int64_t length;
  bool in_place;
};

std::vector<Case> Cases(int size) {
  std::vector<Case> cases;
  for (DType dtype : kTypes) {
    for (ReduceOp op : kOps) {
      for (int64_t length : Lengths(size)) {
        const bool in_place = (length + static_cast<int>(op)) % 2 == 0;
        cases.push_back({std::string(DTypeName(dtype)) + "/" + ReduceOpName(op) + "/" +
                             std::to_string(length) + "#" + std::to_string(cases.size()),
                         dtype, op, length, in_place});
      }
    }
  }
  return cases;
}

void CheckAllreduce(const std::string& algorithm, const std::string& transport, int size) {
  const std::string where =
      algorithm + " over " + transport + ", " + std::to_string(size) + " ranks";
  Ranks ranks(size, transport, AlgorithmConfig(algorithm));
  const std::vector<Case> cases = Cases(size);
  ranks.Each([&](int rank) {
    std::vector<std::vector<uint8_t>> inputs(cases.size());
    std::vector<std::vector<uint8_t>> outputs(cases.size());
    std::vector<Pending> pending;
    for (size_t c = 0; c < cases.size(); ++c) {
      // Every rank submits in its own order.
      const size_t slot = (c + static_cast<size_t>(rank) * 3) % cases.size();
      const Case& k = cases[slot];
      const size_t bytes = static_cast<size_t>(k.length) * DTypeSize(k.dtype);
      inputs[slot].resize(bytes);
      for (int64_t i = 0; i < k.length; ++i) Write(k.dtype, &inputs[slot], i, Value(rank, i));
      if (!k.in_place) outputs[slot].assign(bytes, 0xee);
      auto request = MakeRequest(CollectiveKind::kAllreduce, k.name, k.dtype);
      request->info.op = k.op;
      AddTensor(request.get(), inputs[slot].data(),
                k.in_place ? inputs[slot].data() : outputs[slot].data(), {k.length}, slot);
      pending.push_back(Start(ranks[rank], std::move(request)));
    }
    for (Pending& p : pending) CHECK_OK(p.Wait());
    for (size_t c = 0; c < cases.size(); ++c) {
      const Case& k = cases[c];
      const std::vector<uint8_t>& result = k.in_place ? inputs[c] : outputs[c];
      std::vector<uint8_t> expected(result.size());
      for (int64_t i = 0; i < k.length; ++i) {
        Write(k.dtype, &expected, i, Expected(k.dtype, k.op, size, i));
      }
      CHECK_EQ_IN(result == expected, true, where + ", " + k.name);
      if (k.in_place) continue;
      for (int64_t i = 0; i < k.length; ++i) Write(k.dtype, &expected, i, Value(rank, i));
      CHECK_EQ_IN(inputs[c] == expected, true, where + ", input of " + k.name + " untouched");
    }
  });
}

TEST(every_allreduce_over_every_transport) {
  for (const AlgorithmEntry& algorithm : Algorithms()) {
    if (algorithm.kind != CollectiveKind::kAllreduce) continue;
    for (const TransportEntry& transport : Transports()) {
      for (int size : kRanks) CheckAllreduce(algorithm.name, transport.name, size);
      std::printf("covered: allreduce/%s over %s\n", algorithm.name, transport.name);
    }
  }
}

TEST(scale_factors_apply_once) {
  for (const AlgorithmEntry& algorithm : Algorithms()) {
    if (algorithm.kind != CollectiveKind::kAllreduce) continue;
    for (int size : kRanks) {
      Ranks ranks(size, "inproc", AlgorithmConfig(algorithm.name));
      for (DType dtype : kTypes) {
        if (!IsFloating(dtype)) continue;
        ranks.Each([&](int rank) {
          std::vector<uint8_t> data(5000 * DTypeSize(dtype));
          std::vector<uint8_t> expected(data.size());
          for (int64_t i = 0; i < 5000; ++i) {
            Write(dtype, &data, i, Value(rank, i));
            Write(dtype, &expected, i, Expected(dtype, ReduceOp::kSum, size, i) * 0.5 * 4.0);
          }
          auto request = MakeRequest(CollectiveKind::kAllreduce, DTypeName(dtype), dtype);
          request->info.prescale = 0.5;
          request->info.postscale = 4.0;
          AddTensor(request.get(), data.data(), data.data(), {50, 100});
          CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
          CHECK_EQ_IN(data == expected, true, std::string(algorithm.name) + DTypeName(dtype));
        });
      }
    }
  }
}

// 1/3 of each is not exact in half types: the result must be the float32 sum, rounded once.
TEST(half_types_are_rounded_once) {
  for (const AlgorithmEntry& algorithm : Algorithms()) {
    if (algorithm.kind != CollectiveKind::kAllreduce) continue;
    for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
      const auto to_bits = dtype == DType::kFloat16 ? &FloatToHalf : &FloatToBfloat16;
      const auto to_float = dtype == DType::kFloat16 ? &HalfToFloat : &Bfloat16ToFloat;
      Ranks ranks(4, "shm", AlgorithmConfig(algorithm.name));
      ranks.Each([&](int rank) {
        std::vector<uint16_t> data(5000);
        std::vector<uint16_t> expected(data.size());
        for (size_t i = 0; i < data.size(); ++i) {
          const auto value = [&](int r) {
            return to_bits(std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(r)));
          };
          data[i] = value(rank);
          float sum = to_float(value(0));
          for (int r = 1; r < 4; ++r) sum += to_float(value(r));
          expected[i] = to_bits(sum / 4.0f);
        }
        auto request = MakeRequest(CollectiveKind::kAllreduce, "half", dtype);
        request->info.op = ReduceOp::kAverage;
        AddTensor(request.get(), data.data(), data.data(), {5000});
        CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
        CHECK(data == expected);
      });
    }
  }
}

// The owner of a slice adds in rank order, wherever it stands in that order itself.
TEST(pairwise_adds_in_rank_order) {
  for (int size : {3, 4, 7}) {
    Ranks ranks(size, "shm", AlgorithmConfig("pairwise"));
    ranks.Each([&](int rank) {
      const auto value = [](int r, size_t i) {
        return std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(r) * 1.9f);
      };
      std::vector<float> data(5000);
      std::vector<float> expected(data.size());
      for (size_t i = 0; i < data.size(); ++i) {
        data[i] = value(rank, i);
        expected[i] = value(0, i);
        for (int r = 1; r < size; ++r) expected[i] += value(r, i);
      }
      CHECK_OK(StartAllreduce(ranks[rank], "order", data.data(), data.data(), 5000).Wait());
      CHECK(data == expected);
    });
  }
}

TEST(broadcast_from_every_root_of_every_type) {
  for (const TransportEntry& transport : Transports()) {
    for (int size : kRanks) {
      Ranks ranks(size, transport.name);
      for (int root = 0; root < size; root += std::max(1, size - 1)) {
        for (int64_t length : {int64_t{0}, int64_t{1}, int64_t{9001}}) {
          ranks.Each([&](int rank) {
            std::vector<uint8_t> data(static_cast<size_t>(length), static_cast<uint8_t>(rank + 1));
            auto request = MakeRequest(CollectiveKind::kBroadcast, "b", DType::kUint8);
            request->info.root = root;
            AddTensor(request.get(), data.data(), data.data(), {length});
            CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
            CHECK(data == std::vector<uint8_t>(data.size(), static_cast<uint8_t>(root + 1)));
          });
        }
      }
    }
  }
}

TEST(allgather_of_ragged_rows) {
  for (const TransportEntry& transport : Transports()) {
    for (int size : kRanks) {
      Ranks ranks(size, transport.name);
      for (int64_t scale : {int64_t{0}, int64_t{1}, int64_t{700}}) {
        ranks.Each([&](int rank) {
          std::vector<int32_t> expected;
          for (int r = 0; r < size; ++r) {
            expected.insert(expected.end(), static_cast<size_t>(r % 3 * scale * 2), r + 100);
          }
          const int64_t rows = rank % 3 * scale;
          std::vector<int32_t> in(static_cast<size_t>(rows * 2), rank + 100);
          std::vector<int32_t> out;
          auto request = MakeRequest(CollectiveKind::kAllgather, "g", DType::kInt32);
          AddTensor(request.get(), in.data(), nullptr, {rows, 2});
          request->allocate = [&out](const std::vector<int64_t>&, int64_t total) -> void* {
            out.resize(static_cast<size_t>(total * 2) + 1);  // never an empty, null buffer
            return out.data();
          };
          CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
          out.pop_back();
          CHECK(out == expected);
        });
      }
    }
  }
}

TEST(fusion_and_arrival_do_not_change_bits) {
  std::map<int64_t, std::vector<std::vector<float>>> results;
  for (int64_t fusion : {int64_t{0}, int64_t{64} << 10, int64_t{64} << 20}) {
    for (const char* algorithm : {"ring", "pairwise"}) {
      Config config = TestConfig();
      config.fusion_bytes = fusion;
      config.allreduce_algorithm = algorithm;
      Ranks ranks(4, "shm", config);
      std::vector<std::vector<float>> out(40);
      ranks.Each([&](int rank) {
        std::vector<std::vector<float>> data(40);
        std::vector<Pending> pending;
        for (size_t t = 0; t < data.size(); ++t) {
          const size_t at = (t * 7 + static_cast<size_t>(rank) * 11) % data.size();
          data[at].resize(at * at * 3 + 1);
          for (size_t i = 0; i < data[at].size(); ++i) {
            data[at][i] = std::sin(static_cast<float>(i + at) * 1.7f + static_cast<float>(rank));
          }
          if (rank == 2) std::this_thread::sleep_for(std::chrono::microseconds(at * 50));
          auto request =
              MakeRequest(CollectiveKind::kAllreduce, std::to_string(at), DType::kFloat32);
          AddTensor(request.get(), data[at].data(), data[at].data(),
                    {static_cast<int64_t>(data[at].size())}, at);
          pending.push_back(Start(ranks[rank], std::move(request)));
        }
        for (Pending& p : pending) CHECK_OK(p.Wait());
        if (rank == 3) out = std::move(data);
      });
      const int64_t key = algorithm[0];
      if (results.count(key) == 0) results[key] = out;
      CHECK_EQ_IN(results[key] == out, true, std::string(algorithm) + std::to_string(fusion));
    }
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
