// Allreduces that hide the loss of a rank: which do, what they return, and how they are counted.
#include "runtime/hidden_failures.h"

#include <atomic>
#include <thread>

#include "buckets.h"
#include "check.h"
#include "hand_driven.h"
#include "runtime/c_api.h"

namespace tfdist {
namespace {

// Failures are hidden while it lives, unless a test switches that off.
struct Hiding {
  Hiding() { tfdist_hide_failures(1); }
  ~Hiding() {
    tfdist_hide_failures(0);
    tfdist_take_hidden();
  }
};

const std::vector<float> kInput = {1.0f, -2.0f, 0.5f, 4.0f};

// An allreduce of kInput, into another buffer or in place.
struct Sum {
  explicit Sum(bool writes_in_place)
      : in_place(writes_in_place),
        data(in_place ? kInput : std::vector<float>(kInput.size(), 9.0f)) {}
  std::unique_ptr<Request> Make(const std::string& name) {
    auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
    AddTensor(request.get(), in_place ? data.data() : kInput.data(), data.data(),
              {static_cast<int64_t>(data.size())});
    return request;
  }
  bool HasInput() const { return data == kInput; }
  bool in_place;
  std::vector<float> data;
};

Done SubmitSum(HandDriven* world, int rank, const std::string& name, Sum* sum) {
  return world->Submit(rank, sum->Make(name));
}

// Waits until the rank knows of the failure.
void AwaitFailure(Runtime& runtime) {
  const int64_t end_us = NowUs() + int64_t{kWaitSeconds} * 1000 * 1000;
  while (runtime.failure().ok() && NowUs() < end_us) std::this_thread::yield();
  CHECK_EQ(runtime.failure().code() == Code::kAborted, true);
}

// In every way of submission, after the failure of the world of `runtime`.
void SubmitLater(Runtime& runtime, bool in_place) {
  Sum submitted(in_place);
  Pending pending = Start(runtime, submitted.Make("later"));
  CHECK_OK(pending.Wait());
  CHECK(pending.id != 0);
  CHECK(submitted.HasInput());
  for (const bool blocks : {false, true}) {
    Sum helped(in_place);
    auto request = helped.Make("later");
    std::atomic<int> calls{0};
    std::thread::id ran;
    request->done = [&](const Status& status) {
      CHECK_OK(status);
      ran = std::this_thread::get_id();
      ++calls;
    };
    CHECK_OK(blocks ? runtime.Run(std::move(request))
                    : runtime.SubmitAndDrive(std::move(request), nullptr, 1000 * 1000));
    CHECK_EQ(calls.load(), 1);
    CHECK(ran == std::this_thread::get_id());
    CHECK(helped.HasInput());
  }
}

TEST(pending_and_later_allreduces_return_their_inputs_and_are_counted) {
  const Hiding hiding;
  for (const char* transport : {"inproc", "shm", "tcp"}) {
    Ranks ranks(3, transport);
    std::string group;
    ranks.Each([&](int rank) {
      const std::string id = Register(ranks[rank], "w");
      if (rank == 0) group = id;
    });
    Sum other[2] = {Sum(false), Sum(false)};
    Sum own[2] = {Sum(true), Sum(true)};
    std::vector<std::vector<float>> bucket(2, kInput);
    std::vector<Pending> pending;
    for (int r : {0, 1}) {
      pending.push_back(Start(ranks[r], other[r].Make("x")));
      pending.push_back(Start(ranks[r], own[r].Make("y")));
      pending.push_back(Start(ranks[r], Bucket(group, 0, 1, &bucket[static_cast<size_t>(r)])));
    }
    ranks.Kill(2);
    for (Pending& one : pending) CHECK_OK(one.Wait());
    CHECK_EQ(tfdist_take_hidden(), int64_t{6});
    for (int r : {0, 1}) {
      CHECK(other[r].HasInput() && own[r].HasInput());
      CHECK_CONTAINS(ranks[r].failure().message(), "rank 2 (host testhost");
      CHECK_EQ(ranks[r].good_steps(), int64_t{0});
      for (const bool in_place : {false, true}) SubmitLater(ranks[r], in_place);
    }
    CHECK_EQ(tfdist_take_hidden(), int64_t{12});
    CHECK_EQ(tfdist_take_hidden(), int64_t{0});
  }
}

TEST(all_else_reports_the_failure) {
  const Hiding hiding;
  Ranks ranks(2, "inproc");
  Pending barrier = Start(ranks[0], MakeRequest(CollectiveKind::kBarrier, "b"));
  ranks.Kill(1);
  CHECK_EQ(barrier.Wait().code() == Code::kAborted, true);
  const Status later = Start(ranks[0], MakeRequest(CollectiveKind::kBarrier, "b")).Wait();
  CHECK_EQ(later.message(), ranks[0].failure().message());
  auto invalid = Sum(false).Make("x");
  invalid->info.op = ReduceOp::kLogicalAnd;  // of float32
  CHECK_EQ(Start(ranks[0], std::move(invalid)).Wait().code() == Code::kInvalidArgument, true);
  CHECK_EQ(tfdist_take_hidden(), int64_t{0});
}

TEST(failures_are_reported_when_hiding_is_off) {
  Ranks ranks(2, "inproc");
  Sum sum(false);
  Pending pending = Start(ranks[0], sum.Make("x"));
  ranks.Kill(1);
  AwaitFailure(ranks[0]);
  CHECK_EQ(pending.Wait().message(), ranks[0].failure().message());
  CHECK(!sum.HasInput());
  CHECK_EQ(ranks[0].Submit(sum.Make("x"), nullptr).message(), ranks[0].failure().message());
  {
    const Hiding hiding;
    CHECK_OK(Start(ranks[0], sum.Make("x")).Wait());
  }
  CHECK_EQ(ranks[0].Submit(sum.Make("x"), nullptr).message(), ranks[0].failure().message());
  CHECK_EQ(tfdist_take_hidden(), int64_t{0});
}

TEST(an_own_shutdown_is_no_failure_of_the_world) {
  const Hiding hiding;
  for (const double timeout_s : {1.0, 0.0, -1.0}) {
    Ranks ranks(2, "inproc");
    Sum sum(false);
    Pending pending = Start(ranks[0], sum.Make("x"));
    ranks[0].Shutdown(timeout_s);
    const std::string ended = pending.Wait().message();
    CHECK_CONTAINS(ended, "tfdist was shut down on this rank");
    const std::string later = Start(ranks[0], sum.Make("y")).Wait().message();
    CHECK_CONTAINS(later, "tfdist was shut down");
    CHECK(!sum.HasInput());
  }
  Ranks ranks(2, "inproc");
  ranks.Kill(1);
  AwaitFailure(ranks[0]);
  ranks[0].Shutdown(0);
  const std::string later = Start(ranks[0], Sum(false).Make("x")).Wait().message();
  CHECK_CONTAINS(later, "rank 1");
  CHECK_EQ(tfdist_take_hidden(), int64_t{0});
}

TEST(a_mismatch_is_reported_also_when_the_world_fails_next) {
  const Hiding hiding;
  HandDriven world(2, TestConfig());
  std::vector<float> longer(9);
  Sum sum(false);
  const Done done = SubmitSum(&world, 0, "x", &sum);
  world.Allreduce(1, "x", &longer);
  world.Settle();
  CHECK_EQ((*done)->code() == Code::kFailedPrecondition, true);
  world.Kill(1);
  world.Settle();
  CHECK_EQ(TextOf(SubmitSum(&world, 0, "y", &sum)), "ok");
  CHECK_EQ(tfdist_take_hidden(), int64_t{1});
}

TEST(a_timeout_that_ends_the_world_is_reported) {
  const Hiding hiding;
  HandDriven world(2, TestConfig());
  Sum sum(false);
  const Done done = SubmitSum(&world, 0, "x", &sum);
  world.Pass(16 * 1000 * 1000);
  CHECK_EQ((*done)->code() == Code::kDeadlineExceeded, true);
  CHECK_EQ(TextOf(SubmitSum(&world, 0, "y", &sum)), world[0].failure().message());
  CHECK(!sum.HasInput());
  CHECK_EQ(tfdist_take_hidden(), int64_t{0});
}

// Its step is over on the rank that cancels; the others have lost that rank.
TEST(a_cancelled_operation_is_reported_where_it_was_cancelled) {
  const Hiding hiding;
  HandDriven world(2, TestConfig());
  Sum sums[2] = {Sum(false), Sum(false)};
  const Done other = SubmitSum(&world, 1, "x", &sums[1]);
  const Done cancelled = SubmitSum(&world, 0, "y", &sums[0]);
  world[0].Cancel(world.last_id(), world.now_us);
  world.Settle();
  CHECK_EQ((*cancelled)->code() == Code::kCancelled, true);
  CHECK(!sums[0].HasInput());
  CHECK_EQ(TextOf(other), "ok");
  CHECK(sums[1].HasInput());
  CHECK_EQ(TextOf(SubmitSum(&world, 0, "z", &sums[0])), "ok");
  CHECK(sums[0].HasInput());
  CHECK_EQ(tfdist_take_hidden(), int64_t{2});
}

// The record of the failure that an allreduce of rank 0 has hidden, in a world that `lose` ends.
std::string HiddenRecord(HandDriven* world, const std::function<void()>& lose) {
  Sum sum(false);
  const Done done = SubmitSum(world, 0, "x", &sum);
  world->Settle();
  lose();
  world->Settle();
  CHECK_EQ(TextOf(done), "ok");
  CHECK(sum.HasInput());
  return (*world)[0].failure().payload();
}

TEST(all_ways_to_lose_a_rank_are_hidden) {
  const Hiding hiding;
  HandDriven aborted(3, TestConfig());
  const auto abort = [&] { aborted[1].AbortWith({"disk full", "", -1}, aborted.now_us); };
  const std::string by_abort = HiddenRecord(&aborted, abort);
  CHECK_CONTAINS(by_abort, "disk full");
  HandDriven left(3, TestConfig());
  const std::string by_leaving = HiddenRecord(&left, [&] { left[1].Leave(left.now_us); });
  CHECK_CONTAINS(by_leaving, "\"kind\": \"shutdown\"");
  HandDriven minority(3, TestConfig());
  std::vector<std::unique_ptr<Engine>> silent;
  const std::string alone = HiddenRecord(&minority, [&] {
    for (size_t r : {1, 2}) silent.push_back(std::move(minority.engines[r]));
    // More than twice the time limit of a peer, which is longer in instrumented code.
    minority.Pass(int64_t{kSlowness} * 5 * 1000 * 1000);
  });
  CHECK_CONTAINS(alone, "\"kind\": \"no_majority\"");
  CHECK_EQ(tfdist_take_hidden(), int64_t{3});
}

TEST(what_a_joined_rank_takes_part_in_is_not_counted) {
  const Hiding hiding;
  HandDriven world(3, TestConfig());
  auto join = MakeRequest(CollectiveKind::kJoin, "join");
  join->agreed = [](const Response&) {};
  const Done joined = world.Submit(2, std::move(join));
  world.Settle();
  Sum sums[2] = {Sum(false), Sum(false)};
  world.data_open[0] = world.data_open[2] = false;
  const Done done = SubmitSum(&world, 0, "x", &sums[0]);
  SubmitSum(&world, 1, "x", &sums[1]);
  const auto moves = world[2].moves();
  world.Settle();
  CHECK(world[2].moves() > moves);  // it takes part, and has not finished
  world.Kill(1);
  world.Settle();
  CHECK_EQ(TextOf(done), "ok");
  CHECK((*joined)->code() == Code::kAborted);
  CHECK_EQ(tfdist_take_hidden(), int64_t{1});
}

// The first of two buckets is reduced on every rank; the second one never starts on rank 1.
TEST(a_bucket_that_is_held_back_returns_its_input) {
  const Hiding hiding;
  Config config = TestConfig();
  config.atomic_steps = 1;
  HandDriven world(3, config);
  world.Register("g");
  std::vector<std::vector<Sum>> sums(3, std::vector<Sum>(2, Sum(false)));
  std::vector<Done> done;
  for (size_t r = 0; r < 3; ++r) {
    for (int bucket = 0; bucket < (r == 1 ? 1 : 2); ++bucket) {
      auto request = sums[r][static_cast<size_t>(bucket)].Make("g." + std::to_string(bucket));
      request->group = "g";
      request->bucket_index = bucket;
      request->bucket_count = 2;
      done.push_back(world.Submit(static_cast<int>(r), std::move(request)));
    }
  }
  world.Settle();
  CHECK(sums[0][0].data == std::vector<float>({3.0f, -6.0f, 1.5f, 12.0f}));
  world.Kill(2);
  world.Settle();
  for (size_t i = 0; i < 3; ++i) CHECK_EQ(TextOf(done[i]), "ok");
  CHECK(sums[0][0].HasInput() && sums[0][1].HasInput() && sums[1][0].HasInput());
  CHECK_EQ(tfdist_take_hidden(), int64_t{3});
  CHECK_EQ(Counter(world[0].CountersJson(), "good_steps"), int64_t{0});
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
