// Failures, and many operations at once.
#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <random>

#include "base/deadline.h"
#include "buckets.h"

namespace tfdist {
namespace {

int OpenDescriptors() {
  int count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

void CheckWorks(Ranks& ranks, const std::string& name) {
  ranks.Each([&](int rank) {
    std::vector<float> data(1000, static_cast<float>(rank + 1));
    CHECK_OK(StartAllreduce(ranks[rank], name, data.data(), data.data(), 1000).Wait());
    const int n = ranks.size();
    CHECK(data == std::vector<float>(1000, static_cast<float>(n * (n + 1) / 2)));
  });
}

TEST(a_sleeping_engine_wakes_at_once) {
  Ranks ranks(2, "shm");
  std::vector<int64_t> quickest_us(2, std::numeric_limits<int64_t>::max());
  for (int round = 0; round < 4; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // both sleep, for up to a second
    ranks.Each([&](int rank) {
      const int64_t begin = NowUs();
      CHECK_OK(Start(ranks[rank], MakeRequest(CollectiveKind::kBarrier, "wake")).Wait());
      int64_t& quickest = quickest_us[static_cast<size_t>(rank)];
      quickest = std::min(quickest, NowUs() - begin);
    });
  }
  CHECK(std::max(quickest_us[0], quickest_us[1]) < 300000);
}

TEST(a_goodbye_to_ranks_that_wait_for_nothing_is_no_failure) {
  Ranks ranks(3, "shm");
  CheckWorks(ranks, "before");
  ranks[1].Shutdown(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_OK(ranks[0].failure());
  CHECK_OK(ranks[2].failure());
}

TEST(a_mismatch_is_an_error_on_every_rank_and_the_world_goes_on) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    std::vector<float> data(8);
    const int64_t begin = NowUs();
    const Status status =
        StartAllreduce(ranks[rank], "w", data.data(), data.data(), rank == 1 ? 7 : 8).Wait();
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_CONTAINS(status.message(), "rank 1: [7]");
    CHECK_CONTAINS(status.message(), "ranks 0,2: [8]");
    CHECK(NowUs() - begin < 5000000);
  });
  CheckWorks(ranks, "after");
}

TEST(a_root_that_is_no_rank_is_an_error_on_every_rank_and_the_world_goes_on) {
  Ranks ranks(3, "shm");
  ranks.Each([&](int rank) {
    std::vector<float> data(8);
    auto request = MakeRequest(CollectiveKind::kBroadcast, "b", DType::kFloat32);
    request->info.root = 3;
    AddTensor(request.get(), data.data(), data.data(), {8});
    const int64_t begin = NowUs();
    const Status status = Start(ranks[rank], std::move(request)).Wait();
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK_CONTAINS(status.message(), "ranks 0,1,2: root must be in [0, 3), got 3");
    CHECK(NowUs() - begin < 5000000);
  });
  CheckWorks(ranks, "after");
}

TEST(bad_arguments_fail_on_the_caller_alone) {
  Ranks ranks(2, "inproc");
  std::vector<int32_t> ints(4);
  auto request = MakeRequest(CollectiveKind::kAllreduce, "i", DType::kInt32);
  request->info.prescale = 0.5;
  AddTensor(request.get(), ints.data(), ints.data(), {4});
  const Status scaled = Start(ranks[0], std::move(request)).Wait();
  CHECK(scaled.code() == Code::kInvalidArgument);
  request = MakeRequest(CollectiveKind::kAllreduce, "u", DType::kFloat8E5m2);
  AddTensor(request.get(), ints.data(), ints.data(), {4});
  CHECK(Start(ranks[0], std::move(request)).Wait().code() == Code::kInvalidArgument);
  CheckWorks(ranks, "after");
}

TEST(a_killed_rank_is_named_on_every_other_rank) {
  for (const TransportEntry& transport : Transports()) {
    Ranks ranks(3, transport.name);
    CheckWorks(ranks, "before");
    std::vector<float> data(100000);
    Pending p0 = StartAllreduce(ranks[0], "g", data.data(), data.data(), 100000);
    std::vector<float> data1(100000);
    Pending p1 = StartAllreduce(ranks[1], "g", data1.data(), data1.data(), 100000);
    const int64_t begin = NowUs();
    ranks.Kill(2);
    for (Pending* p : {&p0, &p1}) {
      const Status status = p->Wait();
      CHECK(status.code() == Code::kAborted);
      CHECK_CONTAINS(status.message(), "rank 2 (host testhost, pid 4242)");
      CHECK_CONTAINS(status.message(), "\"g\"");
      CHECK_CONTAINS(status.payload(), "\"rank\": 2");
      CHECK(status.message().find("no sign of life") == std::string::npos);  // that takes 2 s
    }
    CHECK(NowUs() - begin < 5000000);
    const Status later = StartAllreduce(ranks[0], "h", data.data(), data.data(), 10).Wait();
    CHECK_CONTAINS(later.message(), "rank 2");
  }
}

TEST(a_cancelled_operation_ends_here_and_names_this_rank_elsewhere) {
  Ranks ranks(3, "shm");
  std::vector<float> data(100);
  std::vector<float> data1(100);
  Pending p0 = StartAllreduce(ranks[0], "x", data.data(), data.data(), 100);
  Pending p1 = StartAllreduce(ranks[1], "x", data1.data(), data1.data(), 100);
  const int64_t begin = NowUs();
  ranks[1].Cancel(p1.id);
  CHECK(p1.Wait().code() == Code::kCancelled);
  const Status other = p0.Wait();
  CHECK(other.code() == Code::kAborted);
  CHECK_CONTAINS(other.message(), "rank 1");
  CHECK_CONTAINS(other.payload(), "\"rank\": 1");
  CHECK(NowUs() - begin < 5000000);
  CHECK(StartAllreduce(ranks[1], "y", data.data(), data.data(), 10).Wait().code() ==
        Code::kAborted);
}

TEST(an_abort_carries_its_cause) {
  for (int64_t sockets : {1, 5}) {
    Config config = TestConfig();
    config.tcp_sockets = sockets;
    Ranks ranks(2, "tcp", config);
    std::vector<float> data(10);
    Pending p0 = StartAllreduce(ranks[0], "x", data.data(), data.data(), 10);
    ranks[1].Abort({"ValueError: bad label 11", "", -1});
    const Status status = p0.Wait();
    CHECK(status.code() == Code::kAborted);
    CHECK_CONTAINS(status.message(), "ValueError: bad label 11");
    CHECK_CONTAINS(status.message(), "rank 1");
  }
}

TEST(a_deadline_names_the_ranks_that_did_not_come) {
  Config config = TestConfig();
  config.timeout_s = 0.3;
  Ranks ranks(4, "shm", config);
  std::vector<std::vector<float>> data(4, std::vector<float>(10));
  Pending p1 = StartAllreduce(ranks[1], "x", data[1].data(), data[1].data(), 10);
  Pending p3 = StartAllreduce(ranks[3], "x", data[3].data(), data[3].data(), 10);
  for (Pending* p : {&p1, &p3}) {
    const int64_t begin = NowUs();
    const Status status = p->Wait();
    CHECK(status.code() == Code::kDeadlineExceeded);
    CHECK_CONTAINS(status.message(), "ranks 0,2");
    CHECK_CONTAINS(status.payload(), "\"kind\": \"timeout\"");
    CHECK(NowUs() - begin < 2000000);
  }
}

TEST(a_rank_that_shut_down_is_named_to_those_who_wait_for_it) {
  for (int leaver : {0, 2}) {
    Ranks ranks(3, "shm");
    std::vector<float> data(10);
    Pending p = StartAllreduce(ranks[1], "x", data.data(), data.data(), 10);
    ranks[leaver].Shutdown(2);
    const Status status = p.Wait();
    CHECK(status.code() == Code::kAborted);
    CHECK_CONTAINS(status.message(), "rank " + std::to_string(leaver));
    CHECK_CONTAINS(status.message(), "has shut down");
  }
}

// The goodbye of a fast rank must not overtake what the slow ones still need.
TEST(leaving_right_after_the_last_operation_hurts_nobody) {
  for (const TransportEntry& transport : Transports()) {
    for (int round = 0; round < 40; ++round) {
      Ranks ranks(4, transport.name);
      ranks.Each([&](int rank) {
        std::vector<float> data(30000, 1.0f);
        CHECK_OK(StartAllreduce(ranks[rank], "last", data.data(), data.data(), 30000).Wait());
        ranks[rank].Shutdown(2);
        CHECK(data == std::vector<float>(30000, 4.0f));
      });
    }
  }
}

TEST(groups_register_once_and_agree_on_who_has_gradients) {
  Ranks ranks(3, "inproc");
  ranks.Each([&](int rank) {
    std::vector<uint8_t> present = {1, static_cast<uint8_t>(rank == 2), 0};
    std::string id;
    CHECK_OK(ranks[rank].RegisterGroup(0, "a\nb\nc\nop", &present, 5, &id));
    CHECK(present == std::vector<uint8_t>({1, 1, 0}));
    CHECK_EQ(id.size(), size_t{32});
    // Known by now: no rank waits for another.
    present = {1, 0, 0};
    if (rank == 1) CHECK_OK(ranks[rank].RegisterGroup(0, "a\nb\nc\nop", &present, 5, &id));
    if (rank == 1) CHECK(present == std::vector<uint8_t>({1, 1, 0}));
    present = {1, 1, 1};
    const Status late = ranks[rank].RegisterGroup(0, "a\nb\nc\nop", &present, 5, &id);
    CHECK(late.code() == Code::kFailedPrecondition);
    for (const size_t count : {size_t{2}, size_t{4}}) {
      present.assign(count, 0);
      const Status other = ranks[rank].RegisterGroup(0, "a\nb\nc\nop", &present, 5, &id);
      CHECK(other.code() == Code::kInvalidArgument);
      CHECK_CONTAINS(other.message(), "expected 3 gradients");
      CHECK_EQ(present.size(), count);
    }
  });
  ranks.Each([&](int rank) {
    std::vector<uint8_t> present = {1};
    std::string id;
    const std::string own = "v float32 [" + std::to_string(rank == 1 ? 3 : 2) + "]\nop";
    const Status status = ranks[rank].RegisterGroup(0, own, &present, 5, &id);
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_CONTAINS(status.message(), "rank 1: \"v float32 [3]\"");
  });
}

TEST(steps_are_counted_when_all_their_buckets_are_done) {
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    for (int step = 0; step < 3; ++step) {
      for (int bucket = 0; bucket < 2; ++bucket) {
        if (step == 2 && bucket == 1) break;
        std::vector<float> data(10);
        auto request =
            MakeRequest(CollectiveKind::kAllreduce, "g/" + std::to_string(bucket), DType::kFloat32);
        AddTensor(request.get(), data.data(), data.data(), {10});
        request->group = "g";
        request->bucket_index = bucket;
        request->bucket_count = 2;
        CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
      }
    }
    CHECK_EQ(ranks[rank].good_steps(), int64_t{2});
  });
}

TEST(one_name_in_flight_twice_runs_twice_in_order) {
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    std::vector<float> a(100, 1.0f);
    std::vector<float> b(100, 10.0f);
    Pending pa = StartAllreduce(ranks[rank], "same", a.data(), a.data(), 100);
    Pending pb = StartAllreduce(ranks[rank], "same", b.data(), b.data(), 100);
    CHECK_OK(pa.Wait());
    CHECK_OK(pb.Wait());
    CHECK(a[0] == 2.0f && b[99] == 20.0f);
  });
}

TEST(many_tensors_in_random_order_from_four_threads) {
  for (const TransportEntry& transport : Transports()) {
    for (int64_t max_active : {int64_t{1}, int64_t{16}}) {
      Config config = TestConfig();
      config.max_active = max_active;
      config.fusion_bytes = 64 << 10;
      Ranks ranks(4, transport.name, config);
      for (int round = 0; round < 5; ++round) {
        ranks.Each([&](int rank) {
          std::vector<int> order(200);
          std::iota(order.begin(), order.end(), 0);
          std::mt19937 random(static_cast<unsigned>(rank * 100 + round));
          std::shuffle(order.begin(), order.end(), random);
          std::vector<std::vector<float>> data(200);
          std::atomic<size_t> next{0};
          std::atomic<int> bad{0};
          std::vector<std::thread> threads;
          for (int t = 0; t < 4; ++t) {
            threads.emplace_back([&] {
              std::vector<std::pair<int, Pending>> mine;
              for (size_t at; (at = next.fetch_add(1)) < order.size();) {
                const int name = order[at];
                auto& tensor = data[static_cast<size_t>(name)];
                tensor.assign(static_cast<size_t>(1 + name * 37), static_cast<float>(name + rank));
                mine.emplace_back(
                    name, StartAllreduce(ranks[rank], std::to_string(name), tensor.data(),
                                         tensor.data(), static_cast<int64_t>(tensor.size())));
              }
              for (auto& [name, pending] : mine) {
                const Status status = pending.Wait();
                if (!status.ok() && bad.fetch_add(1) == 0) CHECK_EQ(status.message(), "");
                const auto sum = static_cast<float>(4 * name + 6);
                for (float v : data[static_cast<size_t>(name)]) bad += v != sum;
              }
            });
          }
          for (auto& thread : threads) thread.join();
          CHECK_EQ(bad.load(), 0);
        });
      }
    }
  }
}

TEST(records_tell_when_an_operation_came_agreed_and_ended) {
  Ranks ranks(2, "shm");
  CheckWorks(ranks, "before");  // nobody in this process has asked
  CHECK(ranks[0].TakeRecords(10).empty());
  Runtime::WantRecords();
  CheckWorks(ranks, "seen");
  const auto records = ranks[0].TakeRecords(10);
  CHECK_EQ(records.size(), size_t{1});
  CHECK_EQ(records[0].name, "seen");
  CHECK_EQ(records[0].bytes, int64_t{4000});
  CHECK(records[0].submitted_us > 0 && records[0].submitted_us <= records[0].agreed_us &&
        records[0].agreed_us <= records[0].done_us);
  CHECK(ranks[0].TakeRecords(10).empty());
}

TEST(bytes_on_the_wire_are_those_of_the_schedule) {
  for (const AlgorithmEntry& algorithm : Algorithms()) {
    if (algorithm.kind != CollectiveKind::kAllreduce) continue;
    Config config = TestConfig();
    config.allreduce_algorithm = algorithm.name;
    Ranks ranks(4, "shm", config);
    std::vector<std::vector<float>> data(4, std::vector<float>(10000));
    const std::vector<TensorView> view = {{nullptr, nullptr, 10000, 0}};
    std::vector<int64_t> elements;
    for (const Slice& slice : CutAllreduce(view, 4, PartCount(algorithm, {0, 4, 0, {}}))) {
      elements.push_back(slice.elements);
    }
    ranks.Each([&](int rank) {
      auto& own = data[static_cast<size_t>(rank)];
      CHECK_OK(StartAllreduce(ranks[rank], "w", own.data(), own.data(), 10000).Wait());
      const SendCount expected =
          CountSends(algorithm.make({rank, 4, 0, {}}), elements, DType::kFloat32, 4096);
      uint64_t bytes = 0;
      const std::string json = ranks[rank].CountersJson();
      for (size_t at = 0; (at = json.find("data_bytes_sent\": ", at)) != std::string::npos;) {
        at += 18;
        bytes += std::stoull(json.substr(at));
      }
      CHECK_EQ_IN(bytes, expected.bytes, algorithm.name);
    });
  }
}

TEST(worlds_come_and_go_without_leaving_descriptors) {
  {
    Ranks ranks(3, "shm");
  }
  const int before = OpenDescriptors();
  for (int i = 0; i < 30; ++i) {
    for (const TransportEntry& transport : Transports()) {
      Ranks ranks(3, transport.name);
      if (i % 3 == 0) CheckWorks(ranks, "x");
      if (i % 3 == 1) ranks.Kill(1);
    }
  }
  CHECK_EQ(OpenDescriptors(), before);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
