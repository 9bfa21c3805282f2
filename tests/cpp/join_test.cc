// Ranks without data: what they contribute to every collective, in every order of events.
#include "scheduler/join.h"

#include <cstring>
#include <numeric>
#include <random>

#include "buckets.h"
#include "hand_driven.h"

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
      config.commit_gate = gate;
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

TEST(the_timeout_counts_from_the_last_collective) {
  Config config = TestConfig();
  config.timeout_s = 2 * kSlowness;
  Ranks ranks(2, "shm", config);
  ranks.Each([&](int rank) {
    for (int step = 0; step < 5 && rank == 0; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(600 * kSlowness));
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

// A rank of the test below in one round: its steps, then its join.
struct Round {
  struct Step {
    std::vector<std::vector<float>> data;
    std::vector<Done> done;
    bool over() const {
      return std::all_of(done.begin(), done.end(), [](const Done& one) { return *one != nullptr; });
    }
  };
  size_t wanted = 0;
  std::vector<Step> steps;
  Done joined;
  int32_t latest = -1;
  int64_t complete = -1;
};

// Two buckets of a group, averaged; of another length at each step where they `change`.
void Submit(HandDriven* ranks, int rank, bool change, Round* round) {
  const size_t number = round->steps.size();
  const size_t elements = 600 + (change ? number : 0);
  Round::Step& step = round->steps.emplace_back();
  step.data.assign(2, std::vector<float>(elements, static_cast<float>(rank + 1)));
  for (int b : {0, 1}) {
    auto& data = step.data[static_cast<size_t>(b)];
    auto request =
        MakeRequest(CollectiveKind::kAllreduce, "w." + std::to_string(b), DType::kFloat32);
    AddTensor(request.get(), data.data(), data.data(), {static_cast<int64_t>(elements)});
    request->info.op = ReduceOp::kAverage;
    request->group = "w";
    request->bucket_index = b;
    request->bucket_count = 2;
    step.done.push_back(ranks->Submit(rank, std::move(request)));
  }
}

void Join(HandDriven* ranks, int rank, Round* round) {
  auto request = MakeRequest(CollectiveKind::kJoin, "join");
  request->agreed = [round](const Response& response) {
    round->latest = static_cast<int32_t>(response.number);
    round->complete = response.rows[0];
  };
  round->joined = ranks->Submit(rank, std::move(request));
}

// All ranks' results of one round.
void CheckRound(const std::vector<Round*>& places, const std::string& text) {
  size_t most = 0;
  for (const Round* round : places) most = std::max(most, round->wanted);
  int32_t latest = 0;
  while (places[static_cast<size_t>(latest)]->wanted < most) ++latest;
  const auto complete = std::count_if(places.begin(), places.end(),
                                      [&](const Round* round) { return round->wanted == most; });
  for (const Round* round : places) {
    CHECK_EQ_IN(round->complete, complete, text);
    CHECK_EQ_IN(TextOf(round->joined), std::string("ok"), text);
    CHECK_EQ_IN(round->latest, latest, text);
    for (size_t number = 0; number < round->steps.size(); ++number) {
      float sum = 0;
      float active = 0;
      for (size_t r = 0; r < places.size(); ++r) {
        if (places[r]->wanted <= number) continue;
        sum += static_cast<float>(r + 1);
        active += 1;
      }
      const Round::Step& step = round->steps[number];
      for (const Done& done : step.done) CHECK_EQ_IN(TextOf(done), std::string("ok"), text);
      for (const auto& data : step.data) {
        CHECK_EQ_IN(data == std::vector<float>(data.size(), sum / active), true, text);
      }
    }
  }
}

// Rank 2 says that it knows of rank 1 so late that the leader hears it when rank 1 has joined
// again.
TEST(an_answer_about_an_earlier_join_does_not_count) {
  HandDriven ranks(3, TestConfig());
  ranks.Register("w");
  Round rounds[2][3];
  for (int rank : {0, 1, 2}) {
    Submit(&ranks, rank, false, &rounds[0][rank]);
    rounds[0][rank].wanted = 1;
    rounds[1][rank].wanted = rank == 1 ? 0 : 1;
  }
  ranks.Settle();
  const auto poll = [&](std::initializer_list<int> order) {
    for (int rank : order) ranks.Poll(rank);
  };
  ranks.control_open[2] = false;
  for (int rank : {1, 2, 0}) Join(&ranks, rank, &rounds[0][rank]);
  poll({1, 2, 0, 0, 1});  // 2 has not read that 1 has joined; all have
  ranks.control_open[2] = true;
  Join(&ranks, 1, &rounds[1][1]);
  poll({2, 1});  // both are on their way to the leader: the answer, and the next join
  ranks.control_open[2] = false;
  poll({0});
  for (int rank : {0, 2}) Submit(&ranks, rank, false, &rounds[1][rank]);
  poll({0, 2, 0, 1, 1, 0, 2, 1, 0, 2, 2});
  ranks.control_open[2] = true;
  ranks.Settle();
  for (int rank : {0, 2}) Join(&ranks, rank, &rounds[1][rank]);
  ranks.Settle();
  for (auto& round : rounds) CheckRound({round, round + 1, round + 2}, "");
}

// Ranks with different numbers of steps take turns at random, in one thread, for a few rounds; each
// may submit before its earlier steps are over, and join at once; messages and data are held up at
// random.
TEST(no_order_of_events_changes_what_comes_out) {
  constexpr size_t kRounds = 3;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    const std::string text = "seed " + std::to_string(seed);
    std::mt19937 random(seed);
    const int size = 2 + static_cast<int>(random() % 3);
    Config config = TestConfig();
    config.commit_gate = static_cast<int64_t>(seed % 3 == 0);
    const bool change = seed % 5 == 0;
    HandDriven ranks(size, config);
    ranks.Register("w");
    std::vector<std::vector<Round>> places(static_cast<size_t>(size));
    for (auto& rounds : places) {
      rounds.resize(kRounds);
      for (Round& round : rounds) round.wanted = random() % 6;
    }
    std::vector<size_t> at(places.size(), 0);       // the round of each rank
    std::vector<int> shut_until(places.size(), 0);  // the turn from which it reads messages again
    for (int turn = 0, open = size; open > 0; ++turn) {
      CHECK_EQ_IN(turn < 400000, true, text + ": it hangs");
      const auto r = static_cast<size_t>(random()) % places.size();
      const int rank = static_cast<int>(r);
      if (turn >= shut_until[r] && random() % 100 == 0) {
        shut_until[r] = turn + static_cast<int>(random() % 300);
      }
      ranks.control_open[r] = turn >= shut_until[r];
      ranks.data_open[r] = random() % 8 != 0;
      if (random() % 3 != 0) ranks.Poll(rank);
      if (at[r] == kRounds || random() % 4 == 0) continue;
      Round& round = places[r][at[r]];
      if (round.joined != nullptr) {
        if (*round.joined == nullptr) continue;
        if (++at[r] == kRounds) --open;
        continue;
      }
      const size_t waits_for = round.steps.size() < 3 ? 0 : round.steps.size() - 3;
      if (!round.steps.empty() && !round.steps[waits_for].over()) continue;
      if (round.steps.size() < round.wanted) {
        Submit(&ranks, rank, change, &round);
      } else {
        Join(&ranks, rank, &round);
      }
    }
    for (size_t number = 0; number < kRounds; ++number) {
      std::vector<Round*> round;
      for (auto& rounds : places) round.push_back(&rounds[number]);
      CheckRound(round, text + " round " + std::to_string(number));
    }
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
