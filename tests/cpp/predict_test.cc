// Buckets that start without agreement: no message while all goes well, and the same errors as ever
// when it does not.
#include <algorithm>
#include <numeric>
#include <random>

#include "base/deadline.h"
#include "buckets.h"

namespace tfdist {
namespace {

constexpr int kBuckets = 5;

// One step of a group of `kBuckets` buckets.
Status Step(Runtime& runtime, const std::string& group, int rank, int elements = 3000) {
  std::vector<std::vector<float>> data(kBuckets);
  std::vector<Pending> pending;
  for (int b = 0; b < kBuckets; ++b) {
    auto& own = data[static_cast<size_t>(b)];
    own.assign(static_cast<size_t>(elements), static_cast<float>(b + rank));
    pending.push_back(Start(runtime, Bucket(group, b, kBuckets, &own)));
  }
  Status first;
  for (Pending& p : pending) {
    const Status status = p.Wait();
    if (first.ok()) first = status;
  }
  if (!first.ok()) return first;
  const int size = runtime.world().size;
  for (int b = 0; b < kBuckets; ++b) {
    const auto sum = static_cast<float>(size * b + size * (size - 1) / 2);
    CHECK(data[static_cast<size_t>(b)] == std::vector<float>(static_cast<size_t>(elements), sum));
  }
  return Status();
}

TEST(after_the_first_step_no_message_is_sent_for_order) {
  for (const TransportEntry& transport : Transports()) {
    Ranks ranks(3, transport.name);
    ranks.Each([&](int rank) {
      const std::string group = Register(ranks[rank], "w float32 [1]");
      for (int step = 0; step < 2; ++step) CHECK_OK(Step(ranks[rank], group, rank));
    });
    std::vector<int64_t> before(3);
    ranks.Each([&](int rank) {
      before[static_cast<size_t>(rank)] =
          Counter(ranks[rank].CountersJson(), "negotiation_messages");
    });
    ranks.Each([&](int rank) {
      const std::string group = Register(ranks[rank], "w float32 [1]");
      for (int step = 0; step < 100; ++step) CHECK_OK(Step(ranks[rank], group, rank));
    });
    ranks.Each([&](int rank) {
      const std::string json = ranks[rank].CountersJson();
      CHECK_EQ_IN(Counter(json, "negotiation_messages"), before[static_cast<size_t>(rank)], json);
      CHECK_EQ(Counter(json, "predicted"), int64_t{101 * kBuckets});
      CHECK_EQ(Counter(json, "deviations"), int64_t{0});
      CHECK_EQ(Counter(json, "probes"), int64_t{0});
      CHECK_EQ(ranks[rank].good_steps(), int64_t{102});
    });
  }
}

TEST(steps_that_overlap_are_predicted_as_soon_as_the_first_is_agreed_on) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    const std::string group = Register(ranks[rank], "w float32 [1]");
    std::vector<std::vector<float>> data(6, std::vector<float>(100, 1.0f));
    std::vector<Pending> pending;
    for (auto& own : data) pending.push_back(Start(ranks[rank], Bucket(group, 0, 1, &own)));
    for (Pending& p : pending) CHECK_OK(p.Wait());
    for (auto& own : data) CHECK(own == std::vector<float>(100, 3.0f));
    CHECK_EQ(Counter(ranks[rank].CountersJson(), "predicted"), int64_t{5});
  });
}

// A bucket that has run once runs again with other memory, in place and not, two at a time, and
// rounds and divides as it did; also right after its tensors have changed.
TEST(a_bucket_may_lie_elsewhere_every_time) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != CollectiveKind::kAllreduce) continue;
    Config config = TestConfig();
    SetAlgorithm(&config, entry);
    Ranks ranks(4, "shm", config);
    ranks.Each([&](int rank) {
      const std::string group = Register(ranks[rank], "w float32 [1]");
      for (int step = 0; step < 12; ++step) {
        const std::vector<int64_t> counts =
            step < 5 ? std::vector<int64_t>{40, 2} : std::vector<int64_t>{3, 7000, 1};
        std::vector<std::vector<float>> in;
        for (int64_t count : counts) {
          for (int copy = 0; copy < 2; ++copy) {
            in.emplace_back(static_cast<size_t>(count), static_cast<float>(8 * rank + step + copy));
          }
        }
        std::vector<std::vector<float>> out = in;
        std::vector<Pending> pending;
        for (size_t copy = 0; copy < 2; ++copy) {
          auto request = Bucket(group, 0, 1, &out[copy]);
          request->info.op = ReduceOp::kAverage;
          request->info.postscale = 0.5;
          int64_t elements = 0;
          request->tensors.clear();
          for (size_t t = copy; t < in.size(); t += 2) {
            const auto count = static_cast<int64_t>(in[t].size());
            const std::vector<float>& from = step % 3 == 0 ? out[t] : in[t];
            request->tensors.push_back({reinterpret_cast<const uint8_t*>(from.data()),
                                        reinterpret_cast<uint8_t*>(out[t].data()), count, t / 2});
            elements += count;
          }
          request->info.shapes = {{elements}};
          pending.push_back(Start(ranks[rank], std::move(request)));
        }
        for (Pending& p : pending) CHECK_OK(p.Wait());
        for (size_t t = 0; t < out.size(); ++t) {
          const auto mean = static_cast<float>(12 + step + static_cast<int>(t % 2));
          CHECK(out[t] == std::vector<float>(out[t].size(), mean / 2));
        }
      }
      CHECK(Counter(ranks[rank].CountersJson(), "predicted") > 16);
    });
  }
}

TEST(ranks_may_start_buckets_in_any_order_through_a_window_of_one) {
  Config config = TestConfig();
  config.max_active = 1;
  Ranks ranks(2, "shm", config);
  ranks.Each([&](int rank) {
    const std::string group = Register(ranks[rank], "w float32 [1]");
    CHECK_OK(Step(ranks[rank], group, rank));
  });
  // Bucket 4 is behind one that the other rank has not submitted, on both: nobody would begin.
  const std::string group = Register(ranks[0], "w float32 [1]");
  std::vector<std::vector<float>> data(6, std::vector<float>(3000, 1.0f));
  const auto start = [&](int rank, int bucket, size_t at) {
    return Start(ranks[rank], Bucket(group, bucket, kBuckets, &data[at]));
  };
  Pending zero = start(0, 0, 0);
  Pending one = start(1, 1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Pending four[] = {start(0, 4, 2), start(1, 4, 3)};
  for (Pending& p : four) CHECK_OK(p.Wait());
  Pending rest[] = {start(0, 1, 4), start(1, 0, 5)};
  for (Pending& p : rest) CHECK_OK(p.Wait());
  CHECK_OK(zero.Wait());
  CHECK_OK(one.Wait());
  for (const auto& own : data) CHECK(own == std::vector<float>(3000, 2.0f));
}

struct Change {
  const char* what;
  std::function<void(Request*)> apply;
  const char* text;
};

// The change is told to this rank, whose call began at `begin_us`, and soon.
void CheckMismatch(const Change& change, const Status& status, int64_t begin_us) {
  CHECK_EQ_IN(static_cast<int>(status.code()), static_cast<int>(Code::kFailedPrecondition),
              std::string(change.what) + ": " + status.message());
  CHECK_CONTAINS(status.message(), change.text);
  CHECK_CONTAINS(status.payload(), "\"kind\": \"mismatch\"");
  CHECK(NowUs() - begin_us < 5000000);  // the deadline is 15 s
}

// The other ranks are under way without a word when one rank does something else.
TEST(what_one_rank_does_otherwise_is_a_mismatch_on_all_long_before_the_deadline) {
  const std::vector<Change> changes = {
      {"shape",
       [](Request* r) {
         r->info.shapes = {{2999}};
         --r->tensors[0].elements;
       },
       "rank 2: [2999]"},
      {"op", [](Request* r) { r->info.op = ReduceOp::kMax; }, "rank 2: max"},
      {"dtype", [](Request* r) { r->info.dtype = DType::kInt32; }, "rank 2: int32"},
      {"kind",
       [](Request* r) {
         r->info.kind = CollectiveKind::kBroadcast;
         r->group.clear();
       },
       "rank 2: broadcast"},
      {"group", [](Request* r) { r->group.clear(); }, "rank 2: outside of any group"},
  };
  for (const Change& change : changes) {
    Ranks ranks(3, "shm");
    ranks.Each([&](int rank) {
      const std::string group = Register(ranks[rank], "w float32 [1]");
      CHECK_OK(Step(ranks[rank], group, rank));
      const int64_t begin = NowUs();
      std::vector<float> data(3000, 1.0f);
      auto request = Bucket(group, 0, kBuckets, &data);
      if (rank == 2) change.apply(request.get());
      const Status status = Start(ranks[rank], std::move(request)).Wait();
      CheckMismatch(change, status, begin);
    });
  }
}

// One allreduce outside of any group; `change` makes it another one.
Status Repeat(Runtime& runtime, const std::string& name, int elements = 100,
              const std::function<void(Request*)>& change = nullptr) {
  const std::vector<float> in(static_cast<size_t>(elements), 1.0f);
  std::vector<float> out(in.size());
  auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
  AddTensor(request.get(), in.data(), out.data(), {elements});
  request->info.repeats = true;
  if (change) change(request.get());
  const Status status = Start(runtime, std::move(request)).Wait();
  if (!status.ok()) return status;
  CHECK(out == std::vector<float>(in.size(), static_cast<float>(runtime.world().size)));
  return Status();
}

TEST(what_repeats_is_predicted_from_the_tenth_time_on_if_few_take_turns) {
  for (const TransportEntry& transport : Transports()) {
    for (int in_turn : {1, 4, 5, 12}) {
      Ranks ranks(3, transport.name);
      constexpr int kTimes = 40;
      ranks.Each([&](int rank) {
        std::mt19937 rng(7);  // all ranks change the order alike
        std::vector<int> keys(static_cast<size_t>(in_turn));
        std::iota(keys.begin(), keys.end(), 0);
        for (int i = 0; i < kTimes; ++i) {
          const int elements = i < 20 ? 100 : i < 25 ? 7 : 9000;  // and what they reduce, twice
          std::shuffle(keys.begin(), keys.end(), rng);
          for (int key : keys) {
            CHECK_OK(Repeat(ranks[rank], "k" + std::to_string(key), elements));
          }
        }
        const std::string json = ranks[rank].CountersJson();
        const int64_t predicted = in_turn <= 4 ? in_turn * (kTimes - 9 - 2) : 0;
        CHECK_EQ_IN(Counter(json, "predicted"), predicted, json);
        CHECK_EQ_IN(Counter(json, "deviations"), int64_t{in_turn <= 4 ? 2 * in_turn : 0}, json);
      });
    }
  }
}

TEST(what_a_rank_does_not_call_repeated_has_no_number) {
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    const auto silent = [rank](Request* r) { r->info.repeats = rank == 0; };
    for (int i = 0; i < 20; ++i) CHECK_OK(Repeat(ranks[rank], "x", 100, silent));
    CHECK_EQ(Counter(ranks[rank].CountersJson(), "predicted"), int64_t{0});
    // Once it has one, that does not matter any more.
    for (int i = 0; i < 9; ++i) CHECK_OK(Repeat(ranks[rank], "x"));
    for (int i = 0; i < 5; ++i) CHECK_OK(Repeat(ranks[rank], "x", 100, silent));
    CHECK_EQ(Counter(ranks[rank].CountersJson(), "predicted"), int64_t{5});
  });
}

TEST(what_one_rank_repeats_otherwise_is_a_mismatch_on_all_long_before_the_deadline) {
  const std::vector<Change> changes = {
      {"shape",
       [](Request* r) {
         r->info.shapes = {{99}};
         --r->tensors[0].elements;
       },
       "rank 2: [99]"},
      {"op", [](Request* r) { r->info.op = ReduceOp::kMax; }, "rank 2: max"},
      {"kind", [](Request* r) { r->info.kind = CollectiveKind::kReduce; }, "rank 2: reduce"},
      {"group",
       [](Request* r) {
         r->group = "g";
         r->bucket_count = 1;
         r->info.bucket = true;
       },
       "rank 2: a bucket"},
  };
  for (const Change& change : changes) {
    Ranks ranks(3, "shm");
    ranks.Each([&](int rank) {
      for (int i = 0; i < 11; ++i) CHECK_OK(Repeat(ranks[rank], "x"));
      const int64_t begin = NowUs();
      const auto other = [&](Request* r) {
        if (rank != 2) return;
        r->info.repeats = false;
        change.apply(r);
      };
      const Status status = Repeat(ranks[rank], "x", 100, other);
      CheckMismatch(change, status, begin);
    });
  }
}

// Only one of them has counted: what comes after it could go together wrongly.
TEST(what_all_ranks_repeat_otherwise_and_unlike_ends_the_work) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    for (int i = 0; i < 11; ++i) CHECK_OK(Repeat(ranks[rank], "x"));
    const auto reduces = [](Request* r) {
      r->info.repeats = false;
      r->info.kind = CollectiveKind::kReduce;
    };
    const Status status =
        rank == 0 ? Repeat(ranks[rank], "x", 7) : Repeat(ranks[rank], "x", 100, reduces);
    CHECK_CONTAINS(status.message(), "ranks 1,2: reduce");
    CHECK_CONTAINS(Repeat(ranks[rank], "x").message(), "ranks 1,2: reduce");
  });
}

TEST(another_kind_of_operation_may_wait_behind_what_repeats) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    for (int i = 0; i < 11; ++i) CHECK_OK(Repeat(ranks[rank], "x"));
    const int late_ms[] = {0, 150, 900};  // the first asks after 500 ms who is missing
    std::this_thread::sleep_for(std::chrono::milliseconds(late_ms[rank]));
    const std::vector<float> in(100, 1.0f);
    std::vector<float> sum(100);
    auto request = MakeRequest(CollectiveKind::kAllreduce, "x", DType::kFloat32);
    AddTensor(request.get(), in.data(), sum.data(), {100});
    Pending first = Start(ranks[rank], std::move(request));
    std::vector<float> sent(100, static_cast<float>(rank));
    auto other = MakeRequest(CollectiveKind::kBroadcast, "x", DType::kFloat32);
    AddTensor(other.get(), sent.data(), sent.data(), {100});
    Pending second = Start(ranks[rank], std::move(other));
    CHECK_OK(first.Wait());
    CHECK_OK(second.Wait());
    CHECK(sum == std::vector<float>(100, 3.0f) && sent == std::vector<float>(100, 0.0f));
  });
}

TEST(all_ranks_may_change_a_bucket_together) {
  Ranks ranks(3, "inproc");
  ranks.Each([&](int rank) {
    const std::string group = Register(ranks[rank], "w float32 [1]");
    for (int elements : {3000, 3000, 10, 10, 3000}) {
      CHECK_OK(Step(ranks[rank], group, rank, elements));
    }
    const std::string json = ranks[rank].CountersJson();
    CHECK_EQ(Counter(json, "deviations"), int64_t{2 * kBuckets});
    CHECK_EQ(Counter(json, "predicted"), int64_t{2 * kBuckets});
  });
}

TEST(a_rank_that_registers_another_list_is_found_out) {
  Config config = TestConfig();
  config.timeout_s = 15;  // it is waited for a twentieth of it, 1 s at least
  Ranks ranks(3, "shm", config);
  ranks.Each([&](int rank) {
    const std::string group = Register(ranks[rank], "w float32 [1]");
    CHECK_OK(Step(ranks[rank], group, rank));
    const int64_t begin = NowUs();
    Status status;
    if (rank == 1) {
      std::vector<uint8_t> present = {1};
      std::string id;
      status = ranks[rank].RegisterGroup(0, "v float32 [1]\nop=sum", &present, 0, &id);
    } else {
      status = Step(ranks[rank], group, rank);
    }
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_CONTAINS(status.message(), "ranks 0,2: \"w float32 [1]\"; rank 1: \"v float32 [1]\"");
    CHECK(NowUs() - begin < 7000000);
  });
}

TEST(a_deadline_names_the_ranks_that_a_predicted_bucket_misses) {
  for (double timeout_s : {0.3, 1.0}) {
    Config config = TestConfig();
    config.timeout_s = timeout_s;
    Ranks ranks(4, "shm", config);
    std::string group;
    ranks.Each([&](int rank) {
      const std::string id = Register(ranks[rank], "w float32 [1]");
      if (rank == 0) group = id;
      CHECK_OK(Step(ranks[rank], id, rank));
    });
    std::vector<std::vector<float>> data(2, std::vector<float>(3000));
    const int64_t begin = NowUs();
    Pending p1 = Start(ranks[1], Bucket(group, 0, kBuckets, &data[0]));
    Pending p2 = Start(ranks[2], Bucket(group, 0, kBuckets, &data[1]));
    for (Pending* p : {&p1, &p2}) {
      const Status status = p->Wait();
      CHECK(status.code() == Code::kDeadlineExceeded);
      CHECK_CONTAINS(status.message(), "for ranks 0,3");
      CHECK_CONTAINS(status.message(), "The missing ranks are alive");
    }
    CHECK(NowUs() - begin < 4000000);
    CHECK(Counter(ranks[0].CountersJson(), "probes") > 0);
  }
}

TEST(a_slow_rank_is_asked_and_then_all_goes_on) {
  Ranks ranks(3, "shm");
  std::string group;
  ranks.Each([&](int rank) {
    const std::string id = Register(ranks[rank], "w float32 [1]");
    if (rank == 0) group = id;
    CHECK_OK(Step(ranks[rank], id, rank));
  });
  for (int slow : {0, 2}) {
    ranks.Each([&](int rank) {
      if (rank == slow) std::this_thread::sleep_for(std::chrono::milliseconds(900));
      for (int i = 0; i < 3; ++i) CHECK_OK(Step(ranks[rank], group, rank));
    });
  }
  CHECK(Counter(ranks[0].CountersJson(), "probes") > 0);
  CHECK_EQ(Counter(ranks[0].CountersJson(), "deviations"), int64_t{0});
}

TEST(a_rank_that_has_left_is_named_to_those_whose_bucket_waits_for_it) {
  for (int leaver : {0, 2}) {
    for (bool before : {true, false}) {
      Ranks ranks(3, "shm");
      std::string group;
      ranks.Each([&](int rank) {
        const std::string id = Register(ranks[rank], "w float32 [1]");
        if (rank == 0) group = id;
        for (int i = 0; i < 2; ++i) CHECK_OK(Step(ranks[rank], id, rank));
      });
      std::vector<float> data(3000);
      const int64_t begin = NowUs();
      if (before) ranks[leaver].Shutdown(2);
      Pending p = Start(ranks[1], Bucket(group, 0, kBuckets, &data));
      if (!before) ranks[leaver].Shutdown(2);
      const Status status = p.Wait();
      CHECK(status.code() == Code::kAborted);
      CHECK_CONTAINS(status.message(), "rank " + std::to_string(leaver));
      CHECK_CONTAINS(status.message(), "has shut down");
      CHECK_CONTAINS(status.message(), "will not take part in");
      CHECK(NowUs() - begin < 4000000);
    }
  }
}

// The goodbye of a fast rank must not take away what the slow ones need of a predicted bucket.
TEST(leaving_right_after_a_predicted_step_hurts_nobody) {
  for (const TransportEntry& transport : Transports()) {
    for (int round = 0; round < 20; ++round) {
      Ranks ranks(4, transport.name);
      ranks.Each([&](int rank) {
        const std::string group = Register(ranks[rank], "w float32 [1]");
        for (int i = 0; i < 3; ++i) CHECK_OK(Step(ranks[rank], group, rank));
        ranks[rank].Shutdown(2);
      });
    }
  }
}

TEST(a_death_or_a_cancellation_ends_predicted_buckets_on_all_ranks) {
  for (bool kill : {true, false}) {
    Ranks ranks(3, "shm");
    std::string group;
    ranks.Each([&](int rank) {
      const std::string id = Register(ranks[rank], "w float32 [1]");
      if (rank == 0) group = id;
      CHECK_OK(Step(ranks[rank], id, rank));
    });
    std::vector<std::vector<float>> data(2, std::vector<float>(100000));
    Pending p0 = Start(ranks[0], Bucket(group, 0, kBuckets, &data[0]));
    Pending p1 = Start(ranks[1], Bucket(group, 0, kBuckets, &data[1]));
    // Sizes differ from before, so these two ask the leader; the next ones do not.
    std::vector<std::vector<float>> same(2, std::vector<float>(3000));
    Pending q0 = Start(ranks[0], Bucket(group, 1, kBuckets, &same[0]));
    Pending q1 = Start(ranks[1], Bucket(group, 1, kBuckets, &same[1]));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (kill) {
      ranks.Kill(2);
    } else {
      ranks[1].Cancel(q1.id);
    }
    const int culprit = kill ? 2 : 1;
    const Status status = q0.Wait();
    CHECK(status.code() == Code::kAborted);
    CHECK_CONTAINS(status.message(), "rank " + std::to_string(culprit));
    CHECK(q1.Wait().code() == (kill ? Code::kAborted : Code::kCancelled));
    CHECK(!p0.Wait().ok() && !p1.Wait().ok());
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
