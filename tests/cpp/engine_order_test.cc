// Engines driven by hand, in one thread: orders of events that threads meet once in a million runs.
#include <sys/eventfd.h>
#include <unistd.h>

#include "buckets.h"
#include "check.h"
#include "hand_driven.h"

namespace tfdist {
namespace {

struct InlineSink : CompletionSink {
  void Post(std::function<void()> callback) override { callback(); }
};

// Three engines over inproc links; rank 2 hears the leader, and gets rank 1's data, through gates.
struct World3 {
  bool leader_open = true;
  bool data_open = true;
  InlineSink sink;
  std::vector<int> doorbells;
  std::vector<std::unique_ptr<Engine>> engines;

  World3() {
    const TransportEntry* entry = FindTransport("inproc");
    Config config = TestConfig();
    config.allreduce_algorithm = "pairwise";  // data between every two ranks
    config.reduce_algorithm = "star";         // the root takes the inputs of all in one step
    std::vector<Links> links(3);
    for (size_t r = 0; r < 3; ++r) {
      links[r].resize(3);
      doorbells.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    }
    for (int a = 0; a < 3; ++a) {
      for (int b = a + 1; b < 3; ++b) {
        const auto i = static_cast<size_t>(a);
        const auto j = static_cast<size_t>(b);
        LinkEnds end_a;
        LinkEnds end_b;
        CHECK_OK(entry->make_pair(a, b, doorbells[i], doorbells[j], config, &end_a, &end_b));
        links[i][j] = std::move(entry->make(end_a, config).value());
        links[j][i] = std::move(entry->make(end_b, config).value());
      }
    }
    links[2][0] = std::make_unique<GatedLink>(std::move(links[2][0]), Lane::kControl, &leader_open);
    links[2][1] = std::make_unique<GatedLink>(std::move(links[2][1]), Lane::kData, &data_open);
    for (int r = 0; r < 3; ++r) {
      World world;
      world.rank = r;
      world.size = world.local_size = 3;
      world.hosts.assign(3, "testhost");
      world.pids.assign(3, 4242);
      Engine::Hooks hooks;
      hooks.completions = &sink;
      engines.push_back(
          std::make_unique<Engine>(world, std::move(links[static_cast<size_t>(r)]), config, hooks));
    }
  }
  ~World3() {
    engines.clear();
    for (int fd : doorbells) close(fd);
  }
  void Turn(int rank, int times = 3) {
    for (int i = 0; i < times; ++i) engines[static_cast<size_t>(rank)]->Poll(1000);
  }
  // Submits a broadcast of ten floats from rank 1; the status returned is set by `done`.
  std::shared_ptr<std::unique_ptr<Status>> Broadcast(int rank, std::vector<float>* data) {
    auto result = std::make_shared<std::unique_ptr<Status>>();
    auto request = MakeRequest(CollectiveKind::kBroadcast, "x", DType::kFloat32);
    data->assign(10, static_cast<float>(rank));
    AddTensor(request.get(), data->data(), data->data(), {10});
    request->info.root = 1;
    request->info.timeout_s = 10;
    request->done = [result](const Status& s) { *result = std::make_unique<Status>(s); };
    engines[static_cast<size_t>(rank)]->Submit(std::move(request), 1000);
    return result;
  }
  void Settle() {
    for (int i = 0; i < 5; ++i) {
      for (int r : {1, 2, 0}) Turn(r);
    }
  }
};

std::string Text(const std::shared_ptr<std::unique_ptr<Status>>& done) {
  return *done == nullptr ? "under way" : (*done)->ok() ? "ok" : (*done)->message();
}

// Rank 1 is done and says goodbye before rank 2 has even heard that the collective may run.
TEST(a_goodbye_that_overtakes_the_announcement_ends_nothing) {
  World3 world;
  world.leader_open = false;
  std::vector<std::vector<float>> data(3);
  std::vector<std::shared_ptr<std::unique_ptr<Status>>> done;
  for (int r = 0; r < 3; ++r) done.push_back(world.Broadcast(r, &data[static_cast<size_t>(r)]));
  world.Settle();
  CHECK_EQ(Text(done[1]), "ok");
  world.engines[1]->Leave(1000);
  world.Turn(1);
  world.Turn(2);  // hears the goodbye, still not the announcement
  CHECK_EQ(Text(done[2]), "under way");
  world.leader_open = true;
  world.Settle();
  CHECK_EQ(Text(done[0]), "ok");
  CHECK_EQ(Text(done[2]), "ok");
  CHECK(data[2] == std::vector<float>(10, 1.0f));
}

// Rank 2 has yet to read what rank 1 sent for a collective that runs: the answer has to wait.
TEST(a_goodbye_is_answered_only_when_nothing_of_the_leaver_is_needed) {
  World3 world;
  world.data_open = false;
  std::vector<std::vector<float>> data(3);
  std::vector<std::shared_ptr<std::unique_ptr<Status>>> done;
  for (int r = 0; r < 3; ++r) done.push_back(world.Broadcast(r, &data[static_cast<size_t>(r)]));
  world.Settle();
  world.engines[1]->Leave(1000);
  world.Settle();
  CHECK_EQ(Text(done[1]), "ok");
  CHECK_EQ(Text(done[2]), "under way");
  CHECK(!world.engines[1]->Left());
  world.data_open = true;
  world.Settle();
  CHECK_EQ(Text(done[2]), "ok");
  CHECK(world.engines[1]->Left());
}

// Rank 2 holds what rank 0 sent, because rank 1's data does not come; rank 0 waits for the answer
// to its goodbye as long as it may, and goes. (engine_sim, seed 11865.)
TEST(what_a_rank_has_sent_is_used_although_it_goes_before_its_goodbye_was_answered) {
  World3 world;
  world.data_open = false;
  std::vector<std::vector<float>> data(3, std::vector<float>(10, 1.0f));
  std::vector<std::shared_ptr<std::unique_ptr<Status>>> done(3);
  for (size_t r = 0; r < 3; ++r) {
    auto request = MakeRequest(CollectiveKind::kReduce, "x", DType::kFloat32);
    AddTensor(request.get(), data[r].data(), data[r].data(), {10});
    request->info.root = 2;
    request->info.timeout_s = 10;
    auto result = done[r] = std::make_shared<std::unique_ptr<Status>>();
    request->done = [result](const Status& s) { *result = std::make_unique<Status>(s); };
    world.engines[r]->Submit(std::move(request), 1000);
  }
  world.Settle();
  world.engines[0]->Leave(1000);
  world.Settle();
  CHECK_EQ(Text(done[0]), "ok");
  CHECK(!world.engines[0]->Left());
  CHECK_EQ(Text(done[2]), "under way");
  world.engines[0].reset();
  for (int i = 0; i < 10; ++i) {
    for (int rank : {1, 2}) world.Turn(rank);
  }
  CHECK_EQ(Text(done[2]), "under way");
  world.data_open = true;
  for (int i = 0; i < 10; ++i) {
    for (int rank : {1, 2}) world.Turn(rank);
  }
  CHECK_EQ(Text(done[2]), "ok");
  CHECK(data[2] == std::vector<float>(10, 3.0f));
}

// The data that rank 1 has sent are lost with it, although it had said goodbye.
TEST(a_rank_that_goes_before_its_data_have_arrived_is_named) {
  World3 world;
  world.data_open = false;
  std::vector<std::vector<float>> data(3);
  std::vector<std::shared_ptr<std::unique_ptr<Status>>> done;
  for (int r = 0; r < 3; ++r) done.push_back(world.Broadcast(r, &data[static_cast<size_t>(r)]));
  world.Settle();
  world.engines[1]->Leave(1000);
  world.Settle();
  CHECK_EQ(Text(done[1]), "ok");
  CHECK(!world.engines[1]->Left());
  world.engines[1].reset();
  for (int i = 0; i < 10; ++i) {
    for (int rank : {0, 2}) world.Turn(rank);
    for (size_t rank : {0, 2}) world.engines[rank]->Tick(1000 + i * 50 * 1000);
  }
  CHECK_CONTAINS(Text(done[2]),
                 "rank 1 (host testhost, pid 4242) failed: it has shut down, and its connection "
                 "ended before all of its data had arrived");
}

// A forked child of a dead rank can keep its socket open; the engine is told by other means.
TEST(a_peer_whose_process_has_ended_is_lost_although_its_connection_is_open) {
  World3 world;
  std::vector<float> data;
  auto done = world.Broadcast(0, &data);
  world.Settle();
  CHECK_EQ(Text(done), "under way");
  world.engines[0]->PeerEnded(2);
  for (int i = 0; i < 5; ++i) {
    for (int r : {0, 1}) world.Turn(r);  // both agree
  }
  CHECK_EQ_IN(Text(done).rfind("rank 2 (host testhost, pid 4242) failed", 0), size_t{0},
              Text(done));
}

// Rank 2 was asked before it came. Then it comes, but data does not: nobody is missing, so nobody
// may be named as missing.
TEST(a_rank_that_comes_after_it_was_asked_is_not_blamed) {
  constexpr int64_t kSecond = 1000000;
  World3 world;
  std::vector<std::vector<float>> data(3, std::vector<float>(3000, 1.0f));
  std::vector<std::shared_ptr<std::unique_ptr<Status>>> done(3);
  const auto submit = [&](size_t rank, std::unique_ptr<Request> request, int64_t now_us) {
    auto result = done[rank] = std::make_shared<std::unique_ptr<Status>>();
    request->done = [result](const Status& s) { *result = std::make_unique<Status>(s); };
    request->info.timeout_s = 4;
    world.engines[rank]->Submit(std::move(request), now_us);
  };
  const auto bucket = [&](size_t rank) { return Bucket("group id", 0, 1, &data[rank]); };
  const auto settle = [&](int64_t now_us) {
    for (int i = 0; i < 9; ++i) {
      for (auto& engine : world.engines) engine->Poll(now_us);
    }
  };
  const auto tick = [&](int64_t now_us, size_t ranks = 3) {
    for (size_t r = 0; r < ranks; ++r) world.engines[r]->Tick(now_us);
    settle(now_us);
  };
  for (size_t r = 0; r < 3; ++r) {
    auto request = MakeRequest(CollectiveKind::kRegister, "gradients");
    request->info.description = "w";
    request->group = "group id";
    request->agreed = [](const Response&) {};
    submit(r, std::move(request), 1);
  }
  settle(1);
  for (size_t r = 0; r < 3; ++r) submit(r, bucket(r), 1);
  settle(1);
  for (size_t r = 0; r < 3; ++r) CHECK_EQ(Text(done[r]), "ok");
  world.data_open = false;
  for (size_t r = 0; r < 2; ++r) submit(r, bucket(r), kSecond);
  settle(kSecond);
  CHECK_EQ(Counter(world.engines[0]->CountersJson(), "probes"), int64_t{0});
  tick(2 * kSecond);
  CHECK(Counter(world.engines[0]->CountersJson(), "probes") > 0);
  submit(2, bucket(2), 3 * kSecond);
  settle(3 * kSecond);
  // Rank 2 does not report a wait of its own yet: all that the leader knows is that it has started.
  tick(4 * kSecond, 2);
  tick(5 * kSecond + kSecond / 3, 2);
  for (size_t r = 0; r < 3; ++r) CHECK_EQ(Text(done[r]), "under way");
  tick(7 * kSecond);
  tick(9 * kSecond);
  for (size_t r = 0; r < 3; ++r) {
    CHECK_CONTAINS(Text(done[r]), "did not finish although every rank had started it");
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
