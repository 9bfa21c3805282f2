// Ranks without data: what they contribute to every collective, in every order of events.
#include "scheduler/join.h"

#include <cmath>
#include <cstring>
#include <numeric>

#include "buckets.h"
#include "ranks.h"

namespace tfdist {
namespace {

int32_t Join(Runtime& runtime, uint32_t set = 0) {
  int32_t latest = -1;
  int32_t complete = -1;
  CHECK_OK(runtime.Join(set, 0, &latest, &complete));
  return latest;
}

Status Reduce(Runtime& runtime, const std::string& name, std::vector<float>* data, ReduceOp op) {
  return StartAllreduce(runtime, name, data->data(), data->data(),
                        static_cast<int64_t>(data->size()), op)
      .Wait();
}

// Rank r has `steps[r]` steps: each is `body(step, active ranks)`, then it joins.
void RunUneven(
    Ranks& ranks, const std::vector<int>& steps,
    const std::function<void(int rank, int step, const std::vector<int>& active)>& body) {
  const auto most = std::max_element(steps.begin(), steps.end());
  const auto latest = static_cast<int32_t>(most - steps.begin());
  ranks.Each([&](int rank) {
    for (int step = 0; step < steps[static_cast<size_t>(rank)]; ++step) {
      std::vector<int> active;
      for (int r = 0; r < ranks.size(); ++r) {
        if (steps[static_cast<size_t>(r)] > step) active.push_back(r);
      }
      body(rank, step, active);
    }
    CHECK_EQ(Join(ranks[rank]), latest);
    // The world goes on.
    std::vector<float> data(10, 1.0f);
    CHECK_OK(Reduce(ranks[rank], "after", &data, ReduceOp::kSum));
    CHECK(data == std::vector<float>(10, static_cast<float>(ranks.size())));
  });
}

TEST(reductions_are_over_the_ranks_that_still_have_data) {
  for (const TransportEntry& transport : Transports()) {
    Ranks ranks(3, transport.name);
    RunUneven(ranks, {5, 3, 0}, [&](int rank, int, const std::vector<int>& active) {
      const auto n = static_cast<float>(active.size());
      const float sum = static_cast<float>(std::accumulate(active.begin(), active.end(), 0)) + n;
      const auto own = static_cast<float>(rank + 1);
      std::vector<float> data(5000, own);
      CHECK_OK(Reduce(ranks[rank], "sum", &data, ReduceOp::kSum));
      CHECK(data == std::vector<float>(5000, sum));
      data.assign(7, own);
      CHECK_OK(Reduce(ranks[rank], "average", &data, ReduceOp::kAverage));
      CHECK(data == std::vector<float>(7, sum / n));
      data.assign(7, -own);
      CHECK_OK(Reduce(ranks[rank], "max", &data, ReduceOp::kMax));
      CHECK(data == std::vector<float>(7, -static_cast<float>(active.front() + 1)));
      data.assign(7, own);
      CHECK_OK(Reduce(ranks[rank], "min", &data, ReduceOp::kMin));
      CHECK(data == std::vector<float>(7, static_cast<float>(active.front() + 1)));
      data.assign(7, -0.0f);
      CHECK_OK(Reduce(ranks[rank], "signs", &data, ReduceOp::kSum));
      CHECK(std::signbit(data[0]));
    });
  }
}

TEST(buckets_of_gradients_are_averaged_over_those_that_submit_them) {
  for (int gate : {0, 1}) {
    for (const char* transport : {"shm", "tcp"}) {
      Config config = TestConfig();
      config.atomic_steps = gate;
      Ranks ranks(4, transport, config);
      const std::vector<int> steps = {6, 2, 9, 0};
      const auto run = [&] {
        RunUneven(ranks, steps, [&](int rank, int step, const std::vector<int>& active) {
          const std::string group = Register(ranks[rank], "w float32 [1]");
          std::vector<std::vector<float>> data(3);
          std::vector<Pending> pending;
          for (int b = 0; b < 3; ++b) {
            auto& own = data[static_cast<size_t>(b)];
            own.assign(static_cast<size_t>(2000 + b), static_cast<float>((rank + 1) * (step + 1)));
            auto request = Bucket(group, b, 3, &own);
            request->info.op = ReduceOp::kAverage;
            request->tensors[0].hint = static_cast<uint64_t>(b);
            pending.push_back(Start(ranks[rank], std::move(request)));
          }
          for (Pending& p : pending) CHECK_OK(p.Wait());
          float sum = 0;
          for (int r : active) sum += static_cast<float>((r + 1) * (step + 1));
          for (const auto& own : data) {
            CHECK_EQ(own.back(), sum / static_cast<float>(active.size()));
            CHECK(own == std::vector<float>(own.size(), own.back()));
          }
        });
      };
      run();
      run();  // rank 3 knows of the group what it was told
      ranks.Each([&](int rank) {
        CHECK_EQ(Counter(ranks[rank].CountersJson(), "deviations"), int64_t{0});
      });
    }
  }
}

// `allocate` of a collective with rows.
struct Rows {
  std::vector<int32_t> in;
  std::vector<int32_t> out;
  Rows(Runtime& runtime, CollectiveKind kind, std::vector<int32_t> values,
       std::vector<int64_t> splits = {}, int root = 0, bool scalar = false)
      : in(std::move(values)) {
    auto request = MakeRequest(kind, "rows", DType::kInt32);
    request->info.splits = std::move(splits);
    request->info.root = root;
    std::vector<int64_t> shape = {static_cast<int64_t>(in.size())};
    if (scalar) shape.clear();
    AddTensor(request.get(), in.data(), nullptr, shape);
    request->allocate = [this](const std::vector<int64_t>&, int64_t total) -> void* {
      static int32_t nothing;
      out.resize(static_cast<size_t>(total));
      return out.empty() ? &nothing : out.data();
    };
    CHECK_OK(Start(runtime, std::move(request)).Wait());
  }
};

TEST(a_rank_without_data_has_no_rows_and_drops_what_it_gets) {
  for (const TransportEntry& transport : Transports()) {
    Ranks ranks(3, transport.name);
    RunUneven(ranks, {2, 0, 2}, [&](int rank, int, const std::vector<int>&) {
      Runtime& own = ranks[rank];
      Rows gathered(own, CollectiveKind::kAllgather, {rank, rank + 10});
      CHECK(gathered.out == std::vector<int32_t>({0, 10, 2, 12}));
      Rows scalars(own, CollectiveKind::kAllgather, {rank}, {}, 0, true);
      CHECK(scalars.out == std::vector<int32_t>({0, 2}));
      Rows to_joined(own, CollectiveKind::kGather, {rank}, {}, 1);
      CHECK(to_joined.out.empty());
      Rows to_all(own, CollectiveKind::kAlltoall, {rank, rank + 10, rank + 20}, {1, 1, 1});
      CHECK(to_all.out ==
            (rank == 0 ? std::vector<int32_t>({0, 2}) : std::vector<int32_t>({20, 22})));
      Rows parts(own, CollectiveKind::kReduceScatter, {rank, 1, 2, 3}, {1, 2, 1});
      CHECK(parts.out == std::vector<int32_t>({rank == 0 ? 2 : 6}));
      Rows scattered(own, CollectiveKind::kScatter,
                     rank == 2 ? std::vector<int32_t>({5, 6, 7}) : std::vector<int32_t>(),
                     rank == 2 ? std::vector<int64_t>({1, 1, 1}) : std::vector<int64_t>(), 2);
      CHECK(scattered.out == std::vector<int32_t>({rank == 0 ? 5 : 7}));
      std::vector<float> sent(10, static_cast<float>(rank));
      auto request = MakeRequest(CollectiveKind::kBroadcast, "sent", DType::kFloat32);
      request->info.root = 2;
      AddTensor(request.get(), sent.data(), sent.data(), {10});
      CHECK_OK(Start(own, std::move(request)).Wait());
      CHECK(sent == std::vector<float>(10, 2.0f));
      std::vector<float> reduced(10, static_cast<float>(rank + 1));
      request = MakeRequest(CollectiveKind::kReduce, "reduced", DType::kFloat32);
      AddTensor(request.get(), reduced.data(), reduced.data(), {10});
      CHECK_OK(Start(own, std::move(request)).Wait());
      if (rank == 0) CHECK(reduced == std::vector<float>(10, 4.0f));
      CHECK_OK(Start(own, MakeRequest(CollectiveKind::kBarrier, "barrier")).Wait());
    });
  }
}

TEST(a_broadcast_from_a_rank_that_has_joined_is_an_error_on_every_rank) {
  for (CollectiveKind kind : {CollectiveKind::kBroadcast, CollectiveKind::kAddSet}) {
    Ranks ranks(3, "shm");
    ranks.Each([&](int rank) {
      Status status;
      if (rank == 1) {
        int32_t unused[2];
        status = ranks[rank].Join(0, 0, unused, unused + 1);
      } else if (kind == CollectiveKind::kAddSet) {
        uint32_t id = 0;
        status = ranks[rank].AddProcessSet({0, 2}, 0, &id);
      } else {
        std::vector<float> data(10);
        auto request = MakeRequest(kind, "weights", DType::kFloat32);
        request->info.root = 1;
        AddTensor(request.get(), data.data(), data.data(), {10});
        status = Start(ranks[rank], std::move(request)).Wait();
      }
      CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kFailedPrecondition));
      CHECK_CONTAINS(status.message(), "rank 1");
      CHECK_CONTAINS(status.message(), "has joined");
    });
  }
}

TEST(what_the_others_disagree_on_names_them) {
  Ranks ranks(3, "inproc");
  ranks.Each([&](int rank) {
    if (rank != 0) {
      std::vector<float> data(static_cast<size_t>(rank), 1.0f);
      const Status status = Reduce(ranks[rank], "x", &data, ReduceOp::kSum);
      CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kFailedPrecondition));
      CHECK_CONTAINS(status.message(), "rank 2: [2]");
    }
    Join(ranks[rank]);
  });
}

TEST(a_rank_that_has_joined_calls_nothing_until_all_have) {
  Ranks ranks(2, "shm");
  std::thread joiner([&] { Join(ranks[1]); });
  std::vector<float> data(3, 1.0f);
  CHECK_OK(Reduce(ranks[0], "x", &data, ReduceOp::kSum));  // so it has joined
  const Status status = Reduce(ranks[1], "y", &data, ReduceOp::kSum);
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kFailedPrecondition));
  CHECK_CONTAINS(status.message(), "tfdist.join()");
  Join(ranks[0]);
  joiner.join();
}

TEST(a_process_set_joins_by_itself) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    uint32_t set = 0;
    CHECK_OK(ranks[rank].AddProcessSet({0, 2}, 0, &set));
    if (rank == 2) CHECK_EQ(Join(ranks[rank], set), 0);
    if (rank == 0) {
      std::vector<float> data(5, 3.0f);
      auto request = MakeRequest(CollectiveKind::kAllreduce, "x", DType::kFloat32);
      request->info.set = set;
      AddTensor(request.get(), data.data(), data.data(), {5});
      CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
      CHECK(data == std::vector<float>(5, 3.0f));
      CHECK_EQ(Join(ranks[rank], set), 0);
    }
    std::vector<float> data(5, 1.0f);
    CHECK_OK(Reduce(ranks[rank], "all", &data, ReduceOp::kSum));
    CHECK(data == std::vector<float>(5, 3.0f));
  });
}

TEST(a_group_that_was_registered_meanwhile_is_known_afterwards) {
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    const auto step = [&](float expected) {
      const std::string group = Register(ranks[rank], "late float32 [3]");
      std::vector<float> data(3, 1.0f);
      CHECK_OK(Start(ranks[rank], Bucket(group, 0, 1, &data)).Wait());
      CHECK(data == std::vector<float>(3, expected));
    };
    for (int i = 0; i < 2 && rank == 0; ++i) step(1.0f);
    Join(ranks[rank]);
    for (int i = 0; i < 2; ++i) step(2.0f);
  });
}

TEST(a_group_of_a_process_set_that_was_registered_meanwhile_is_known_for_that_set) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    const std::string list = "late float32 [3]";
    uint32_t set = 0;
    CHECK_OK(ranks[rank].AddProcessSet({0, 2}, 0, &set));
    if (rank == 0) {
      std::vector<uint8_t> present = {1};
      std::string group;
      CHECK_OK(ranks[rank].RegisterGroup(set, list, &present, 0, &group));
    }
    if (rank != 1) {
      Join(ranks[rank], set);
      std::vector<uint8_t> present = {1};
      std::string group;
      CHECK(ranks[rank].FindGroup(set, list, &present, &group));
      CHECK(!ranks[rank].FindGroup(0, list, &present, &group));
    }
  });
}

TEST(a_rank_that_waits_alone_gives_up_after_its_timeout) {
  Config config = TestConfig();
  config.timeout_s = 1;
  Ranks ranks(2, "shm", config);
  int32_t unused[2];
  const Status status = ranks[1].Join(0, 0, unused, unused + 1);
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kDeadlineExceeded));
  CHECK_CONTAINS(status.message(), "join \"join\" has waited");
  CHECK_CONTAINS(status.message(), "rank 0");
}

TEST(a_join_of_a_process_set_that_times_out_names_the_set) {
  Config config = TestConfig();
  config.timeout_s = 1;
  Ranks ranks(2, "shm", config);
  uint32_t set = 0;
  ranks.Each([&](int rank) {
    uint32_t id = 0;
    CHECK_OK(ranks[rank].AddProcessSet({0, 1}, 0, &id));
    if (rank == 1) set = id;
  });
  int32_t unused[2];
  const Status status = ranks[1].Join(set, 0, unused, unused + 1);
  CHECK_CONTAINS(status.message(), "of process set " + std::to_string(set) + " has waited");
}

TEST(the_timeout_counts_from_the_last_collective) {
  Config config = TestConfig();
  config.timeout_s = 3 * kSlowness;
  Ranks ranks(2, "shm", config);
  ranks.Each([&](int rank) {
    for (int step = 0; step < 12 && rank == 0; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300 * kSlowness));
      std::vector<float> data(3, 1.0f);
      CHECK_OK(Reduce(ranks[rank], "x", &data, ReduceOp::kSum));
    }
    Join(ranks[rank]);
  });
}

TEST(a_rank_that_leaves_or_dies_ends_the_waiting_of_one_that_has_joined) {
  for (bool dies : {false, true}) {
    Ranks ranks(3, "tcp");
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (dies) {
        ranks[0].Shutdown(-1);
      } else {
        ranks[0].Shutdown(5);
      }
    });
    std::vector<std::thread> joined;
    for (int rank : {1, 2}) {
      joined.emplace_back([&ranks, rank] {
        int32_t unused[2];
        const Status status = ranks[rank].Join(0, 0, unused, unused + 1);
        CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kAborted));
        CHECK_CONTAINS(status.message(), "rank 0");
      });
    }
    for (auto& thread : joined) thread.join();
    other.join();
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
