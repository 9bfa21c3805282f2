// A wrong leader, a slow callback, a fork or a bad bucket must not lose a `done`, write out of
// bounds, wait for ever or keep the processor busy.
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "buckets.h"
#include "ranks.h"

namespace tfdist {
namespace {

struct InlineSink : CompletionSink {
  void Post(std::function<void()> callback) override { callback(); }
};

// The engine of rank 1, and the leader's end of its link in the hands of the test.
class LedByTest {
 public:
  explicit LedByTest(int size) {
    const TransportEntry* entry = FindTransport("inproc");
    const Config config = TestConfig();
    for (int& doorbell : doorbells_) doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    LinkEnds ends[2];
    CHECK_OK(entry->make_pair(0, 1, doorbells_[0], doorbells_[1], config, &ends[0], &ends[1]));
    leader_ = std::move(entry->make(ends[0], config).value());
    const auto n = static_cast<size_t>(size);
    Links links(n);
    links[0] = std::move(entry->make(ends[1], config).value());
    World world;
    world.rank = 1;
    world.size = world.local_size = size;
    world.hosts.assign(n, "testhost");
    world.pids.assign(n, 4242);
    Engine::Hooks hooks;
    hooks.completions = &sink_;
    hooks.allocated = [](uint32_t, uint64_t, void*) {};
    engine = std::make_unique<Engine>(world, std::move(links), config, hooks);
  }
  ~LedByTest() {
    engine.reset();
    leader_.reset();
    for (int doorbell : doorbells_) close(doorbell);
  }
  void Announce(const Response& response) {
    Say(FrameType::kResponse, 0, EncodeResponse(response));
  }
  void Say(FrameType type, uint32_t set, const std::string& message) {
    const MutableByteSpan room = leader_->BeginSend(Lane::kControl, message.size());
    CHECK(room.data() != nullptr);
    std::memcpy(room.data(), message.data(), message.size());
    FrameHeader header;
    header.type = static_cast<uint8_t>(type);
    header.set = set;
    leader_->CommitSend(Lane::kControl, header);
    for (int i = 0; i < 5; ++i) engine->Poll(1000);
  }

  std::unique_ptr<Engine> engine;

 private:
  InlineSink sink_;
  int doorbells_[2];
  std::unique_ptr<Link> leader_;
};

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(an_announcement_of_something_unknown_still_ends_what_is_known) {
  LedByTest rank(2);
  int done = 0;
  float data[4] = {};
  auto request = MakeRequest(CollectiveKind::kAllreduce, "known", DType::kFloat32);
  request->info.timeout_s = 5;
  request->done = [&](const Status& status) { done += !status.ok(); };
  AddTensor(request.get(), data, data, {4});
  rank.engine->Submit(std::move(request), 0);
  Response response;
  response.ticket = 1;
  response.keys = {"known", "unknown"};
  rank.Announce(response);
  CHECK_CONTAINS(rank.engine->failure().message(), "not submitted here");
  CHECK_EQ(done, 1);
}

TEST(announced_rows_that_do_not_fit_are_refused) {
  const std::vector<std::vector<int64_t>> wrong = {{4}, {4, 4, -1}, {4, 5, 4}};
  for (const std::vector<int64_t>& rows : wrong) {
    LedByTest rank(3);
    int done = 0;
    int allocated = 0;
    float data[4] = {};
    auto request = MakeRequest(CollectiveKind::kAllgather, "rows", DType::kFloat32);
    request->info.timeout_s = 5;
    request->done = [&](const Status& status) { done += !status.ok(); };
    request->allocate = [&](const std::vector<int64_t>&, int64_t) -> void* {
      return ++allocated, nullptr;
    };
    AddTensor(request.get(), data, nullptr, {4});
    rank.engine->Submit(std::move(request), 0);
    Response response;
    response.ticket = 1;
    response.keys = {"rows"};
    response.rows = rows;
    rank.Announce(response);
    CHECK_CONTAINS(rank.engine->failure().message(), "do not fit");
    CHECK_EQ(done, 1);
    CHECK_EQ(allocated, 0);
  }
}

TEST(words_about_a_set_that_is_not_known_are_ignored_and_answers_are_not) {
  const std::string probe = EncodeProbe({PredictedTicket(1, 0, 1), 0});
  const std::string stall = EncodeStall("x", "has waited");
  LedByTest rank(3);
  rank.Say(FrameType::kProbe, 7, probe);
  rank.Say(FrameType::kStall, 7, stall);
  CHECK_OK(rank.engine->failure());
  rank.Say(FrameType::kProbe, 0, probe);  // of the world: answered
  CHECK_OK(rank.engine->failure());
  Response response;
  response.keys = {"x"};
  rank.Say(FrameType::kResponse, 7, EncodeResponse(response));
  CHECK(!rank.engine->failure().ok());
}

TEST(what_only_a_member_or_a_leader_may_say_is_refused_from_others) {
  const std::string probe = EncodeProbe({PredictedTicket(1, 0, 1), 1});
  RequestInfo info;
  info.key = "x";
  const std::vector<std::pair<FrameType, std::string>> wrong = {
      {FrameType::kReady, EncodeRequest(info)},  // rank 1 does not lead the world
      {FrameType::kProbeAnswer, probe},
      {FrameType::kWaiting, EncodeWait({PredictedTicket(1, 0, 1), 5, info})},
      {FrameType::kProbe, EncodeProbe({12, 0})},  // not a predicted ticket
      {FrameType::kLeave, "x"},
  };
  for (const auto& [type, message] : wrong) {
    LedByTest rank(3);
    rank.Say(type, 0, message);
    CHECK(!rank.engine->failure().ok());
  }
  LedByTest rank(3);
  rank.Say(FrameType::kProbe, ~0u, probe);  // no set can have that number
  CHECK(!rank.engine->failure().ok());
}

TEST(a_bucket_outside_of_its_group_is_refused) {
  Ranks ranks(1, "inproc");
  std::vector<float> data(10);
  for (int bucket : {-1, 1, 3}) {
    auto request = MakeRequest(CollectiveKind::kAllreduce, "g", DType::kFloat32);
    AddTensor(request.get(), data.data(), data.data(), {10});
    request->group = "g";
    request->bucket_index = bucket;
    request->bucket_count = 1;
    CHECK(Start(ranks[0], std::move(request)).Wait().code() == Code::kInvalidArgument);
  }
}

TEST(a_world_may_end_while_an_allgather_waits_for_memory) {
  Ranks ranks(1, "inproc");
  std::vector<float> data(10);
  std::vector<float> out(10);
  auto in_done = std::make_shared<std::promise<void>>();
  auto slow = MakeRequest(CollectiveKind::kBarrier, "slow");
  slow->done = [in_done](const Status&) {
    in_done->set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  };
  CHECK_OK(ranks[0].Submit(std::move(slow), nullptr));
  in_done->get_future().wait();
  auto request = MakeRequest(CollectiveKind::kAllgather, "x", DType::kFloat32);
  AddTensor(request.get(), data.data(), nullptr, {10});
  request->allocate = [&out](const std::vector<int64_t>&, int64_t) -> void* { return out.data(); };
  Pending pending = Start(ranks[0], std::move(request));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ranks.Kill(0);
  CHECK(pending.Wait().code() == Code::kAborted);
}

// The memory behind `allocate` is TensorFlow's until `done`, on whichever thread that runs.
TEST(memory_is_asked_for_before_done_or_not_at_all) {
  for (const bool helps : {false, true}) {
    Ranks ranks(1, "inproc");
    auto in_done = std::make_shared<std::promise<void>>();
    auto slow = MakeRequest(CollectiveKind::kBarrier, "slow");
    slow->done = [in_done](const Status&) {
      in_done->set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    };
    CHECK_OK(ranks[0].Submit(std::move(slow), nullptr));
    in_done->get_future().wait();
    std::vector<float> data(10);
    std::vector<float> out(10);
    std::atomic<bool> ended{false};
    std::atomic<bool> asked_too_late{false};
    std::promise<Status> promise;
    std::thread waits([&] {
      auto request = MakeRequest(CollectiveKind::kAllgather, "x", DType::kFloat32);
      AddTensor(request.get(), data.data(), nullptr, {10});
      request->allocate = [&](const std::vector<int64_t>&, int64_t) -> void* {
        if (ended) asked_too_late = true;
        return out.data();
      };
      request->done = [&](const Status& status) {
        ended = true;
        promise.set_value(status);
      };
      CHECK_OK(helps ? ranks[0].SubmitAndDrive(std::move(request), nullptr, 1000000)
                     : ranks[0].Run(std::move(request)));
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.Kill(0);
    waits.join();
    CHECK(promise.get_future().get().code() == Code::kAborted);
    CHECK(!asked_too_late);
  }
}

TEST(waiting_for_memory_has_a_deadline_too) {
  Config config = TestConfig();
  config.timeout_s = 0.2;
  Ranks ranks(2, "inproc", config);
  std::promise<void> release;
  auto gate = release.get_future().share();
  std::vector<float> data(10);
  std::vector<std::vector<float>> out(2, std::vector<float>(20));
  std::vector<Pending> pending;
  for (int rank = 0; rank < 2; ++rank) {
    auto request = MakeRequest(CollectiveKind::kAllgather, "x", DType::kFloat32);
    AddTensor(request.get(), data.data(), nullptr, {10});
    request->allocate = [gate, &out, rank](const std::vector<int64_t>&, int64_t) -> void* {
      gate.wait();
      return out[static_cast<size_t>(rank)].data();
    };
    pending.push_back(Start(ranks[rank], std::move(request)));
  }
  const int64_t begin = NowUs();
  while ((ranks[0].failure().ok() || ranks[1].failure().ok()) && NowUs() - begin < 3000000) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const bool failed = !ranks[0].failure().ok() && !ranks[1].failure().ok();
  release.set_value();
  for (Pending& p : pending) CHECK(!p.Wait().ok());
  CHECK(failed);
}

// A child that was forked off (a data loader) must not keep a dead rank's connection open, or keep
// the others awake.
TEST(a_forked_child_neither_hides_a_death_nor_keeps_the_engine_busy) {
  for (const char* transport : {"shm", "tcp"}) {
    Ranks ranks(2, transport);
    ranks.Each([&](int rank) {
      CHECK_OK(Start(ranks[rank], MakeRequest(CollectiveKind::kBarrier, "both")).Wait());
    });
    const pid_t child = fork();
    if (child == 0) {
      sleep(10);
      _exit(0);
    }
    const int64_t begin = NowUs();
    ranks.Kill(1);
    const Status status = Start(ranks[0], MakeRequest(CollectiveKind::kBarrier, "alone")).Wait();
    const int64_t told_us = NowUs() - begin;
    const double before = CpuSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const double used = CpuSeconds() - before;
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    CHECK_EQ_IN(static_cast<int>(status.code()), 10, status.message());
    CHECK(told_us < 1000000);
    CHECK_EQ_IN(used < 0.1, true, std::string(transport) + ": " + std::to_string(used) + " s");
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
