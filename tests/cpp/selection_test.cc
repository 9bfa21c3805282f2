// Which algorithm runs a collective: by type, topology and size; by the lines of a tuning file; and
// that nothing that a tensor is fused with changes its bits.
#include "collective/selection.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "scheduler/request_check.h"
#include "settings.h"

namespace tfdist {
namespace {

constexpr int64_t kMuch = int64_t{64} << 20;
constexpr CollectiveKind kSum = CollectiveKind::kAllreduce;

const std::vector<int32_t> kOne = {3, 3, 3, 3};
const std::vector<int32_t> kApart = {0, 1, 2, 3};
const std::vector<int32_t> kTwo = {0, 0, 7, 7};

std::string Selected(CollectiveKind kind, const std::string& wanted, DType dtype,
                     const std::vector<int32_t>& host_of, int64_t bytes = kMuch,
                     const SizeRules& rules = {}) {
  const int size = static_cast<int>(host_of.size());
  const AlgorithmEntry* entry =
      SelectAlgorithm(kind, wanted, {0, size, 0, host_of}, dtype, bytes, rules);
  return entry != nullptr ? entry->name : "none";
}

TEST(much_data_is_moved_by_what_type_and_topology_ask_for) {
  const std::vector<int32_t> lone = {0, 7, 7, 7};
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, kApart), "ring");
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, kOne), "pairwise");
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, kTwo), "two_level");
  CHECK_EQ(Selected(kSum, "auto", DType::kBfloat16, kTwo), "two_level");
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, lone), "ring");
  CHECK_EQ(Selected(kSum, "auto", DType::kBfloat16, kApart), "pairwise");
  CHECK_EQ(Selected(kSum, "ring", DType::kInt64, kOne), "ring");
  CHECK_EQ(Selected(kSum, "ring", DType::kFloat16, kOne), "ring");
  CHECK_EQ(Selected(kSum, "pairwise", DType::kFloat64, kApart), "pairwise");
  CHECK_EQ(Selected(kSum, "torus", DType::kFloat64, {0, 1, 2}), "none");
  CHECK_EQ(Selected(kSum, "binomial", DType::kFloat32, kApart), "none");
  CHECK_EQ(Selected(kSum, "", DType::kFloat32, kApart), "none");
  constexpr CollectiveKind kScattered = CollectiveKind::kReduceScatter;
  CHECK_EQ(Selected(kScattered, "auto", DType::kFloat32, kApart), "ring");
  CHECK_EQ(Selected(kScattered, "auto", DType::kFloat32, kOne), "pairwise");
  CHECK_EQ(Selected(kScattered, "auto", DType::kFloat16, kTwo), "pairwise");
  CHECK_EQ(Selected(CollectiveKind::kAllgather, "auto", DType::kBool, kOne), "ring");
  CHECK_EQ(Selected(CollectiveKind::kBroadcast, "auto", DType::kComplex128, kApart), "binomial");
  CHECK_EQ(Selected(CollectiveKind::kReduce, "auto", DType::kInt8, kApart), "binomial");
  CHECK_EQ(Selected(CollectiveKind::kGather, "auto", DType::kInt8, kApart), "star");
  CHECK_EQ(Selected(CollectiveKind::kScatter, "auto", DType::kInt8, kApart), "star");
  CHECK_EQ(Selected(CollectiveKind::kBarrier, "auto", DType::kFloat32, kApart), "none");
  CHECK_EQ(std::string(CollectiveKindName(CollectiveKind::kRegister)), "register");
}

TEST(little_data_between_hosts_takes_fewer_steps) {
  const auto at = [](int64_t bytes, const std::vector<int32_t>& host_of,
                     DType dtype = DType::kFloat32) {
    return Selected(kSum, "auto", dtype, host_of, bytes);
  };
  // 4 ranks: 2 alpha + 2 n beta = 4 alpha + 1.5 n beta; 3 ranks, one folded: 3 alpha + 3 n beta =
  // 4 alpha + 4/3 n beta.
  CHECK_EQ(CrossoverBytes(2, 2 * 4, 4, 6, 4), 4 * kMessageBytes);
  CHECK_EQ(CrossoverBytes(3, 3 * 3, 4, 4, 3), kMessageBytes * 3 / 5);
  CHECK_EQ(CrossoverBytes(1, 2, 2, 2, 2), kMostCrossover);  // never sends more
  CHECK_EQ(CrossoverBytes(2, 9, 2, 1, 4), 0);               // saves no step
  CHECK_EQ(at(4 * kMessageBytes, kApart), "butterfly");
  CHECK_EQ(at(4 * kMessageBytes + 1, kApart), "halving_doubling");
  CHECK_EQ(at(kMostCrossover, kApart), "halving_doubling");
  CHECK_EQ(at(kMostCrossover + 1, kApart), "ring");
  CHECK_EQ(at(kMostCrossover, {0, 1}), "butterfly");
  CHECK_EQ(at(kMostCrossover + 1, {0, 1}), "ring");
  CHECK_EQ(at(kMessageBytes * 3 / 5, {0, 1, 2}), "butterfly");
  CHECK_EQ(at(kMessageBytes * 3 / 5 + 1, {0, 1, 2}), "ring");
  CHECK_EQ(at(kMessageBytes, kTwo), "butterfly");
  CHECK_EQ(at(kMessageBytes + 1, kTwo), "two_level");
  CHECK_EQ(at(1, {0, 0, 0, 1, 1, 1}), "two_level");  // would be folded
  CHECK_EQ(at(1, {0, 0, 1, 1, 2, 2, 3, 3}), "two_level");
  CHECK_EQ(at(1, kApart, DType::kBfloat16), "pairwise");
  CHECK_EQ(at(kOneShotBytes, kOne), "one_shot");
  CHECK_EQ(at(kOneShotBytes, kOne, DType::kBfloat16), "one_shot");
  CHECK_EQ(at(kOneShotBytes + 1, kOne), "pairwise");
}

TEST(where_not_all_are_connected_partners_are_neighbours) {
  const auto at = [](CollectiveKind kind, int size, int64_t bytes) -> std::string {
    ScheduleArgs args{0, size, 0, {}};
    args.sparse = true;
    return SelectAlgorithm(kind, "auto", args, DType::kFloat16, bytes)->name;
  };
  CHECK_EQ(at(kSum, 32, 100), "butterfly");
  CHECK_EQ(at(kSum, 32, 100000), "halving_doubling");
  CHECK_EQ(at(kSum, 32, kMuch), "halving_doubling");
  CHECK_EQ(at(kSum, 24, 100), "ring");
  CHECK_EQ(at(kSum, 24, kMuch), "ring");
  CHECK_EQ(at(CollectiveKind::kReduceScatter, 32, 100), "ring");
  CHECK_EQ(at(CollectiveKind::kGather, 32, 100), "binomial");
  CHECK_EQ(at(CollectiveKind::kScatter, 32, 100), "binomial");
}

// Whatever is asked for: the choice exists, supports the case, and is the same on every rank, also
// where the rules name rows that support nothing here.
TEST(every_case_has_an_algorithm_and_all_ranks_take_the_same) {
  SizeRules odd;
  for (const AlgorithmEntry& entry : Algorithms()) {
    for (bool half : {false, true}) odd.push_back({entry.kind, half, 1 << 14, entry.name});
  }
  int cases = 0;
  for (const AlgorithmEntry& row : Algorithms()) {
    for (int size : {1, 2, 3, 4, 7, 8, 17, 32}) {
      if (row.kind == CollectiveKind::kSendRecv && size != 2) continue;
      for (const std::vector<int32_t>& host_of : Topologies(size)) {
        for (DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kInt64}) {
          for (int64_t bytes = 0; bytes <= kMuch; bytes = bytes * 5 + 2) {
            for (const SizeRules& rules : {SizeRules(), odd}) {
              const AlgorithmEntry* first = nullptr;
              for (int rank = 0; rank < size; ++rank) {
                ScheduleArgs args{rank, size, size - 1, host_of};
                args.sparse = size > 16;
                const AlgorithmEntry* entry =
                    SelectAlgorithm(row.kind, "auto", args, dtype, bytes, rules);
                CHECK(entry != nullptr);
                CHECK(entry->kind == row.kind && entry->supports(args, dtype));
                if (first == nullptr) first = entry;
                CHECK(entry == first);
                ++cases;
              }
            }
          }
        }
      }
    }
  }
  CHECK(cases > 100000);
}

TEST(rules_hold_for_their_kind_type_size_and_hosts) {
  const std::vector<TuningRule> tuning = {
      {{1, 1, 1, 1}, {kSum, false, 1000, "tree"}},
      {{1, 1, 1, 1}, {kSum, false, 5000, "no such row here"}},
      {{1, 1, 1, 1}, {kSum, true, 1000, "star"}},
      {{2, 2}, {kSum, false, 1000, "double_tree"}},
      {{1, 1, 1, 1}, {CollectiveKind::kBroadcast, false, 50, "star"}},
  };
  const SizeRules rules = RulesFor(tuning, {0, 4, 0, kApart});
  CHECK_EQ(rules.size(), size_t{4});
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, kApart, 1000, rules), "tree");
  CHECK_EQ(Selected(kSum, "auto", DType::kInt8, kApart, 0, rules), "tree");
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, kApart, 1001, rules),
           "butterfly");                                                            // no such row
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, kApart, kMuch, rules), "ring");  // no rule
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat16, kApart, 1000, rules), "star");
  CHECK_EQ(Selected(kSum, "ring", DType::kFloat32, kApart, 1000, rules), "ring");
  CHECK_EQ(Selected(CollectiveKind::kBroadcast, "auto", DType::kInt8, kApart, 50, rules), "star");
  CHECK_EQ(Selected(CollectiveKind::kBroadcast, "auto", DType::kInt8, kApart, 51, rules),
           "binomial");
  CHECK_EQ(RulesFor(tuning, {0, 4, 0, kTwo}).size(), size_t{1});
  CHECK_EQ(RulesFor(tuning, {0, 4, 0, {0, 7, 0, 7}}).size(), size_t{1});  // in turn
  CHECK_EQ(RulesFor(tuning, {0, 4, 0, {}}).size(), size_t{0});
  // A torus of three gives way.
  CHECK_EQ(Selected(kSum, "auto", DType::kFloat32, {0, 1, 2}, 9, {{kSum, false, 9, "torus"}}),
           "butterfly");
}

TEST(rows_of_one_family_give_the_same_bits) {
  int families = 0;
  ForEachRow(kSum, [&](Setting s) {
    if (s.entry->bits_of == nullptr) return;
    ++families;
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat64}) {
      s.dtype = dtype;
      s.op = ReduceOp::kAverage;
      s.lengths = {5, 700, 0, 333};
      s.value = Rough;
      Setting much = s;
      much.entry = FindAlgorithm(kSum, s.entry->bits_of, {0, s.size, 0, s.host_of}, dtype);
      CHECK(much.entry != nullptr && much.entry->bits_of == nullptr);
      Planned one(s);
      Planned other(much);
      one.Run();
      other.Run();
      for (size_t t = 0; t < s.lengths.size(); ++t) {
        CHECK_EQ_IN(one.Output(0, t) == other.Output(0, t), true, s.Name());
      }
    }
  });
  CHECK(families > 10);
}

TEST(what_is_fused_stays_in_its_family) {
  const ScheduleArgs args{0, 4, 0, kApart};
  const auto row = [&](const char* name) {
    return FindAlgorithm(kSum, name, args, DType::kFloat32);
  };
  const auto keep = [&](const char* alone, const char* chosen) -> std::string {
    return KeepBits(row(alone), row(chosen), args, DType::kFloat32)->name;
  };
  CHECK_EQ(keep("star", "pairwise"), "pairwise");
  CHECK_EQ(keep("pairwise", "star"), "star");
  CHECK_EQ(keep("butterfly", "ring"), "halving_doubling");
  CHECK_EQ(keep("star", "ring"), "pairwise");
  CHECK_EQ(keep("ring", "butterfly"), "ring");
}

float RoughFloat(int rank, int64_t tensor, int64_t i) {
  return static_cast<float>(std::sin(static_cast<double>(1 + rank * 7919 + tensor * 104729 + i)));
}

// Named tensors on both sides of a crossover, one after the other, then all at once: fused where
// that keeps their bits, and as many times as it takes.
TEST(fusion_by_arrival_changes_no_bits) {
  Config config = TestConfig();
  Ranks ranks(4, "inproc", config, kApart);
  const std::vector<int64_t> lengths = {100, 40000, 35000, 7, 80000, 100000, 100, 64};
  std::vector<std::vector<std::vector<float>>> alone(4);
  std::vector<std::vector<std::vector<float>>> together(4);
  ranks.Each([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    std::vector<std::vector<float>> in;
    for (size_t t = 0; t < lengths.size(); ++t) {
      in.emplace_back();
      for (int64_t i = 0; i < lengths[t]; ++i) {
        in[t].push_back(RoughFloat(rank, static_cast<int64_t>(t), i));
      }
      alone[r].emplace_back(in[t].size());
      together[r].emplace_back(in[t].size());
    }
    for (size_t t = 0; t < lengths.size(); ++t) {
      CHECK_OK(StartAllreduce(ranks[rank], "t" + std::to_string(t), in[t].data(),
                              alone[r][t].data(), lengths[t])
                   .Wait());
    }
    for (int round = 0; round < 5; ++round) {
      std::vector<Pending> pending;
      for (size_t t = 0; t < lengths.size(); ++t) {
        pending.push_back(StartAllreduce(ranks[rank], "t" + std::to_string(t), in[t].data(),
                                         together[r][t].data(), lengths[t]));
      }
      for (Pending& one : pending) CHECK_OK(one.Wait());
      for (size_t t = 0; t < lengths.size(); ++t) {
        CHECK_EQ(std::memcmp(alone[r][t].data(), together[r][t].data(), 4 * alone[r][t].size()), 0);
      }
    }
  });
}

TEST(a_request_may_name_its_algorithm_and_all_must_name_the_same) {
  Ranks ranks(3, "inproc", TestConfig(), {0, 1, 2});
  std::vector<float> sums(3);
  ranks.Each([&](int rank) {
    const auto ask = [&](const std::string& name, const std::string& algorithm) {
      auto request = MakeRequest(kSum, name, DType::kFloat32);
      const float one = 1;
      AddTensor(request.get(), &one, &sums[static_cast<size_t>(rank)], {1});
      request->info.algorithm = algorithm;
      return Start(ranks[rank], std::move(request)).Wait();
    };
    for (const AlgorithmEntry& entry : Algorithms()) {
      if (entry.kind != kSum) continue;
      CHECK_OK(ask("x", entry.name));
      CHECK_EQ(sums[static_cast<size_t>(rank)], 3.0f);
    }
    const Status differ = ask("y", rank == 1 ? "ring" : "");
    CHECK(differ.code() == Code::kFailedPrecondition);
    CHECK_EQ(differ.message(),
             "\"y\": the ranks do not agree on the algorithm: ranks 0,2: the configured one; rank "
             "1: ring. Ask for one algorithm on every rank.");
    const Status unknown = ask("z", "rings");
    CHECK(unknown.code() == Code::kInvalidArgument);
    CHECK_EQ_IN(unknown.message().find("must be one of auto, ring, ") != std::string::npos, true,
                unknown.message());
  });
}

TEST(the_bytes_that_decide_are_those_that_all_ranks_know) {
  RequestInfo info;
  info.kind = kSum;
  info.dtype = DType::kBfloat16;
  info.shapes = {{3, 5}, {}, {0, 9}};
  CHECK_EQ(DecidingBytes(info, {}), 2 * 16);
  info.kind = CollectiveKind::kAllgather;
  info.shapes = {{7, 5, 2}};
  CHECK_EQ(DecidingBytes(info, {7, 1, 0}), 2 * 80);  // the same on the rank that has one row
  info.shapes = {{1, 5, 2}};
  CHECK_EQ(DecidingBytes(info, {7, 1, 0}), 2 * 80);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
