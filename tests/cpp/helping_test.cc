// Threads that wait for an operation drive the engine themselves: Runtime::Run and SubmitAndDrive.
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "ranks.h"

namespace tfdist {
namespace {

std::unique_ptr<Request> Sum(const std::string& name, const std::vector<float>& in,
                             std::vector<float>* out) {
  auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
  AddTensor(request.get(), in.data(), out->data(), {static_cast<int64_t>(in.size())});
  return request;
}

TEST(an_operation_runs_on_the_thread_that_waits_for_it) {
  for (const char* transport : {"inproc", "shm", "tcp"}) {
    Ranks ranks(3, transport);
    ranks.Each([&](int rank) {
      for (int i = 0; i < 200; ++i) {
        const std::vector<float> in(static_cast<size_t>(1 + i * 37), static_cast<float>(rank + i));
        std::vector<float> out(in.size());
        auto request = Sum("x", in, &out);
        std::thread::id ran;
        int calls = 0;
        request->done = [&](const Status& status) {
          CHECK_OK(status);
          ran = std::this_thread::get_id();
          ++calls;
        };
        CHECK_OK(ranks[rank].Run(std::move(request)));
        CHECK_EQ(calls, 1);
        CHECK(ran == std::this_thread::get_id());
        CHECK(out == std::vector<float>(in.size(), static_cast<float>(3 + 3 * i)));
      }
    });
  }
}

// That of rank 0 of two, which is the first one; waits until both have begun.
std::filesystem::path ProgressThread() {
  const int64_t give_up_us = NowUs() + 10 * 1000 * 1000;
  std::map<int, std::filesystem::path> threads;
  while (threads.size() < 2) {
    CHECK(NowUs() < give_up_us);
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      if (name == "tfdist-progress") threads[std::stoi(task.path().filename())] = task.path();
    }
  }
  return threads.begin()->second;
}

// How often a thread has gone to sleep.
int64_t Sleeps(const std::filesystem::path& thread) {
  std::ifstream status(thread / "status");
  const std::string field = "voluntary_ctxt_switches:";
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, field.size(), field) == 0) return std::stoll(line.substr(field.size()));
  }
  return -1;
}

// A named operation is agreed on by frames, each of which would wake a rank at rest: one that helps
// already, or one that is about to come.
void AgreeWithoutWaking(int first) {
  constexpr int kRounds = 40;
  cpu_set_t all;
  CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
  // Ranks that share a processor help for 20 ms before they leave the rest to that thread.
  CHECK_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  Ranks ranks(2, "shm");
  CHECK_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  const auto run = [&ranks](int rank) {
    const std::vector<float> in(16, 1.0f);
    std::vector<float> out(16);
    auto request = Sum("x", in, &out);
    request->done = [](const Status& status) { CHECK_OK(status); };
    CHECK_OK(ranks[rank].Run(std::move(request)));
  };
  const std::filesystem::path leader = ProgressThread();
  int quick = 0;
  int woken = 0;
  const int64_t give_up_us = NowUs() + 10 * 1000 * 1000;
  for (int round = 0; round < kRounds || (quick < 8 && NowUs() < give_up_us); ++round) {
    const int64_t before = Sleeps(leader);
    const int64_t begin_us = NowUs();
    std::thread early([&run, first] { run(first); });
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    run(1 - first);
    early.join();
    // In a long one the first may rightly have lost its patience.
    if (round == 0 || NowUs() - begin_us > 10000) continue;
    ++quick;
    woken += Sleeps(leader) != before ? 1 : 0;
  }
  if (quick < 8) std::fprintf(stderr, "%d quick rounds: too busy to show anything\n", quick);
  CHECK(quick < 8 || 2 * woken <= quick);
}

TEST(agreement_wakes_no_progress_thread_of_a_leader_that_helps) { AgreeWithoutWaking(0); }

TEST(agreement_wakes_no_progress_thread_of_a_leader_that_comes_later) { AgreeWithoutWaking(1); }

// Several threads of each rank, some help, some only submit, all at the same time.
TEST(helpers_and_the_progress_thread_take_turns) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 150;
  Ranks ranks(2, "shm");
  std::atomic<int> ended{0};
  ranks.Each([&](int rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kRounds; ++i) {
          const std::vector<float> in(static_cast<size_t>(100 + 3000 * t), 1.0f);
          std::vector<float> out(in.size());
          auto request = Sum("t" + std::to_string(t), in, &out);
          if (t == 0) {
            CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
          } else {
            std::promise<Status> promise;
            request->done = [&promise](const Status& status) { promise.set_value(status); };
            const int64_t patience_us = (i + t) % 3 * 20;  // none, some, more
            CHECK_OK(ranks[rank].SubmitAndDrive(std::move(request), nullptr, patience_us));
            auto future = promise.get_future();
            CHECK(future.wait_for(std::chrono::seconds(kWaitSeconds)) == std::future_status::ready);
            CHECK_OK(future.get());
          }
          CHECK(out == std::vector<float>(in.size(), 2.0f));
          ++ended;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  CHECK_EQ(ended.load(), 2 * kThreads * kRounds);
}

// Ranks whose threads begin with different operations would all wait until their helpers give up.
// Should this thread come first, nothing is shown.
TEST(who_helps_holds_back_no_other_thread) {
  constexpr int64_t kPatienceUs = int64_t{30} * 1000 * 1000;
  Ranks ranks(2, "shm");
  const std::vector<float> in(10, 1.0f);
  std::vector<float> first_out(10), second_out(10), other_out(10), another_out(10);
  std::thread helper([&] {
    auto request = Sum("first", in, &first_out);
    request->done = [](const Status& status) { CHECK_OK(status); };
    CHECK_OK(ranks[0].SubmitAndDrive(std::move(request), nullptr, kPatienceUs));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Pending second = Start(ranks[1], Sum("second", in, &other_out));
  auto request = Sum("second", in, &second_out);
  request->done = [](const Status& status) { CHECK_OK(status); };
  CHECK_OK(ranks[0].SubmitAndDrive(std::move(request), nullptr, kPatienceUs));
  CHECK_OK(second.Wait());
  CHECK_OK(Start(ranks[1], Sum("first", in, &another_out)).Wait());
  helper.join();
  CHECK(first_out == std::vector<float>(10, 2.0f));
  CHECK(other_out == std::vector<float>(10, 2.0f));
}

// Rank 1 hands over both, so that an operation of rank 0 that overtakes meets the wrong one.
TEST(what_is_handed_over_first_goes_first) {
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    for (int i = 0; i < 100; ++i) {
      const std::vector<float> one(10, rank == 0 ? 1.0f : 10.0f);
      const std::vector<float> two(10, rank == 0 ? 2.0f : 20.0f);
      std::vector<float> one_out(10), two_out(10);
      Pending first = Start(ranks[rank], Sum("x", one, &one_out));
      auto request = Sum("x", two, &two_out);
      if (rank == 0) {
        request->done = [](const Status& status) { CHECK_OK(status); };
        CHECK_OK(ranks[rank].Run(std::move(request)));
      } else {
        CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
      }
      CHECK_OK(first.Wait());
      CHECK(one_out == std::vector<float>(10, 11.0f) && two_out == std::vector<float>(10, 22.0f));
    }
  });
}

TEST(who_helps_in_vain_leaves_and_hears_later) {
  Ranks ranks(2, "shm");
  const std::vector<float> in(10, 1.0f);
  std::vector<float> out(10);
  auto request = Sum("x", in, &out);
  std::promise<Status> promise;
  request->done = [&promise](const Status& status) { promise.set_value(status); };
  CHECK_OK(ranks[0].SubmitAndDrive(std::move(request), nullptr, 100));
  auto future = promise.get_future();
  CHECK(future.wait_for(std::chrono::milliseconds(1)) == std::future_status::timeout);
  std::vector<float> other(10);
  CHECK_OK(Start(ranks[1], Sum("x", in, &other)).Wait());
  CHECK(future.wait_for(std::chrono::seconds(kWaitSeconds)) == std::future_status::ready);
  CHECK_OK(future.get());
  CHECK(out == std::vector<float>(10, 2.0f));
}

// A short operation has its turn after a long one: nobody helps with that for so long. Who loses
// the processor for longer than its patience leaves anyway, so it has to do so most of the time.
TEST(who_helps_leaves_where_only_other_operations_move) {
  constexpr int kAttempts = 8;
  constexpr size_t kLong = size_t{16} << 20;
  const std::vector<float> in(kLong, 1.0f);
  std::vector<std::vector<float>> out(2, std::vector<float>(kLong));
  std::atomic<int> left{0};
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const std::vector<float> few(10, 1.0f);
      std::vector<float> few_out(10);
      Pending all = Start(ranks[rank], Sum("long", in, &out[static_cast<size_t>(rank)]));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      auto request = Sum("short", few, &few_out);
      std::promise<Status> promise;
      request->done = [&promise](const Status& status) { promise.set_value(status); };
      CHECK_OK(ranks[rank].SubmitAndDrive(std::move(request), nullptr, 2000));
      auto future = promise.get_future();
      if (future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout) ++left;
      CHECK_OK(future.get());
      CHECK_OK(all.Wait());
      CHECK(few_out == std::vector<float>(10, 2.0f));
    }
  });
  CHECK(left > kAttempts);
}

#if defined(__x86_64__)
// TensorFlow's threads take what is below the normal range for zero; they help, others do not.
TEST(the_bits_of_a_sum_do_not_depend_on_the_thread_that_waits) {
  constexpr unsigned int kFlushes = 1u << 15 | 1u << 6;
  Ranks ranks(2, "shm");
  ranks.Each([&](int rank) {
    if (rank == 0) _mm_setcsr(_mm_getcsr() | kFlushes);
    const std::vector<float> in(10, 1e-40f);
    for (const bool helps : {false, true}) {
      std::vector<float> out(10);
      auto request = Sum("x", in, &out);
      std::promise<Status> promise;
      request->done = [&promise](const Status& status) { promise.set_value(status); };
      CHECK_OK(helps ? ranks[rank].SubmitAndDrive(std::move(request), nullptr, 1000000)
                     : ranks[rank].Run(std::move(request)));
      CHECK_OK(promise.get_future().get());
      for (float sum : out) {
        uint32_t bits = 0;
        std::memcpy(&bits, &sum, sizeof(bits));
        CHECK_EQ(bits, 2u * 0x116c2u);  // 1e-40 is 0x116c2 of the smallest number
      }
    }
    CHECK_EQ((_mm_getcsr() & kFlushes), rank == 0 ? kFlushes : 0u);
  });
}
#endif

TEST(a_peer_that_dies_ends_the_wait) {
  Ranks ranks(2, "shm");
  const std::vector<float> in(10, 1.0f);
  std::vector<float> out(10);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.Kill(1);
  });
  auto request = Sum("x", in, &out);
  Status ended;
  request->done = [&ended](const Status& status) { ended = status; };
  CHECK_OK(ranks[0].Run(std::move(request)));
  killer.join();
  CHECK(!ended.ok());
  CHECK(ended.message().find("rank 1") != std::string::npos);
}

TEST(after_the_shutdown_nothing_is_taken) {
  Ranks ranks(1, "inproc");
  ranks[0].Shutdown(1);
  const std::vector<float> in(10, 1.0f);
  std::vector<float> out(10);
  auto request = Sum("x", in, &out);
  request->done = [](const Status&) { CHECK(false); };
  const Status status = ranks[0].Run(std::move(request));
  CHECK(status.message().find("shut down") != std::string::npos);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
