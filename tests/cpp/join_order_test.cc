// Ranks without data: no order of events changes what comes out, and what no rank may say.
#include <cstring>
#include <random>

#include "buckets.h"
#include "hand_driven.h"
#include "scheduler/join.h"

namespace tfdist {
namespace {

// One time that a rank runs out of data: its steps, and what came of each.
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

// Two buckets of a group, averaged, of so many elements.
void Submit(HandDriven* ranks, int rank, size_t elements, Round* round) {
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

// Checks the outcome of a round, by rank.
void Check(const std::vector<const Round*>& by_rank, const std::string& text) {
  size_t most = 0;
  for (const Round* round : by_rank) most = std::max(most, round->wanted);
  int32_t latest = 0;
  while (by_rank[static_cast<size_t>(latest)]->wanted < most) ++latest;
  const auto complete = std::count_if(by_rank.begin(), by_rank.end(),
                                      [&](const Round* round) { return round->wanted == most; });
  for (const Round* round : by_rank) {
    CHECK_EQ_IN(TextOf(round->joined), std::string("ok"), text);
    CHECK_EQ_IN(round->complete, complete, text);
    CHECK_EQ_IN(round->latest, latest, text);
    for (size_t number = 0; number < round->steps.size(); ++number) {
      float sum = 0;
      float active = 0;
      for (size_t r = 0; r < by_rank.size(); ++r) {
        if (by_rank[r]->wanted <= number) continue;
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

// Ranks with different numbers of steps take turns at random, in one thread; each may submit
// before its earlier steps are over, and join at once; messages and data are held up at random.
TEST(no_order_of_events_changes_what_comes_out) {
  for (uint32_t seed = 0; seed < 1500; ++seed) {
    const std::string text = "seed " + std::to_string(seed);
    std::mt19937 random(seed);
    const size_t size = 2 + random() % 3;
    Config config = TestConfig();
    config.atomic_steps = static_cast<int64_t>(seed % 3 == 0);
    const size_t stays = seed % 5 < 2 ? 1 + seed % 5 : 100;  // steps of one length
    const uint32_t held_up = seed % 2 == 0 ? 7 : 2;          // of 8 times
    HandDriven ranks(static_cast<int>(size), config);
    ranks.Register("w");
    std::vector<std::vector<Round>> rounds(size, std::vector<Round>(3));
    for (auto& own : rounds) {
      for (Round& round : own) round.wanted = random() % 6;
    }
    std::vector<size_t> at(size, 0);  // the round of each rank
    for (int turn = 0; std::count(at.begin(), at.end(), size_t{3}) < static_cast<int>(size);
         ++turn) {
      CHECK_EQ_IN(turn < 100000, true, text + ": it hangs");
      const size_t r = random() % size;
      const int rank = static_cast<int>(r);
      if (random() % 4 == 0) ranks.control_open[r] = random() % 8 < held_up;
      if (random() % 4 == 0) ranks.data_open[r] = random() % 8 < held_up;
      if (random() % 3 != 0) ranks.Poll(rank);
      if (at[r] == 3 || random() % 4 == 0) continue;
      Round& round = rounds[r][at[r]];
      if (round.joined != nullptr) {
        if (*round.joined != nullptr) ++at[r];
        continue;
      }
      const size_t waits_for = round.steps.size() < 3 ? 0 : round.steps.size() - 3;
      if (!round.steps.empty() && !round.steps[waits_for].over()) continue;
      if (round.steps.size() < round.wanted) {
        Submit(&ranks, rank, 600 + round.steps.size() / stays, &round);
      } else {
        Join(&ranks, rank, &round);
      }
    }
    for (size_t n = 0; n < 3; ++n) {
      std::vector<const Round*> by_rank;
      for (const auto& own : rounds) by_rank.push_back(&own[n]);
      Check(by_rank, text);
    }
  }
}

// Ranks 0, 1 and 2 with a group of two buckets, which have been averaged once.
struct Three {
  HandDriven ranks{3, TestConfig()};
  Round rounds[3];
  Three() {
    ranks.Register("w");
    for (int r : {0, 1, 2}) Submit(&ranks, r, 600, &rounds[r]);
    ranks.Settle();
    for (const Round& round : rounds) CHECK(round.steps[0].over());
  }
};

TEST(what_is_announced_does_not_overtake_what_was_started_before) {
  Three world;
  HandDriven& ranks = world.ranks;
  ranks.control_open[1] = false;  // rank 1 does not hear of it for a while
  for (int r : {0, 1}) {
    Submit(&ranks, r, 600, &world.rounds[r]);  // predicted
    Submit(&ranks, r, 700, &world.rounds[r]);  // not like the last one: announced
  }
  Join(&ranks, 2, &world.rounds[2]);
  ranks.Settle();
  ranks.control_open[1] = true;
  ranks.Settle();
  for (int r : {0, 1}) Join(&ranks, r, &world.rounds[r]);
  ranks.Settle();
  for (int r : {0, 1}) {
    for (size_t step : {1, 2}) {
      for (const auto& data : world.rounds[r].steps[step].data) CHECK_EQ(data[5], 1.5f);
    }
  }
  for (const Round& round : world.rounds) CHECK_EQ(TextOf(round.joined), std::string("ok"));
}

// Rank 2 says that it knows of rank 1 so late that the leader hears it when rank 1 has joined
// again.
TEST(an_answer_about_an_earlier_join_does_not_count) {
  HandDriven ranks(3, TestConfig());
  ranks.Register("w");
  Round rounds[2][3];
  for (int rank : {0, 1, 2}) {
    Submit(&ranks, rank, 600, &rounds[0][rank]);
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
  for (int rank : {0, 2}) Submit(&ranks, rank, 600, &rounds[1][rank]);
  poll({0, 2, 0, 1, 1, 0, 2, 1, 0, 2, 2});
  ranks.control_open[2] = true;
  ranks.Settle();
  for (int rank : {0, 2}) Join(&ranks, rank, &rounds[1][rank]);
  ranks.Settle();
  for (const auto& round : rounds) Check({round, round + 1, round + 2}, "");
}

// Rank 1 joins, of which rank 0 hears only when it has made two more steps.
TEST(steps_without_elements_are_counted_by_a_rank_that_joins) {
  HandDriven ranks(2, TestConfig());
  ranks.Register("w");
  Round rounds[2];
  for (int rank : {0, 1}) Submit(&ranks, rank, 0, &rounds[rank]);
  ranks.Settle();
  ranks.control_open[0] = false;
  Join(&ranks, 1, &rounds[1]);
  ranks.Settle();
  for (int step = 0; step < 2; ++step) {
    Submit(&ranks, 0, 0, &rounds[0]);
    ranks.Settle();
  }
  ranks.control_open[0] = true;
  ranks.Settle();
  Join(&ranks, 0, &rounds[0]);
  ranks.Settle();
  rounds[0].wanted = 3;
  rounds[1].wanted = 1;
  Check({&rounds[0], &rounds[1]}, "");
  for (int rank : {0, 1}) Submit(&ranks, rank, 3, &rounds[rank]);
  ranks.Settle();
  for (const Round& round : rounds) {
    for (const Done& done : round.steps.back().done) CHECK_EQ(TextOf(done), std::string("ok"));
  }
}

TEST(a_join_ends_after_what_its_rank_takes_part_in) {
  HandDriven ranks(2, TestConfig());
  Round rounds[2];
  Join(&ranks, 1, &rounds[1]);
  ranks.Settle();
  ranks.data_open[1] = false;
  std::vector<float> data(10, 3.0f);
  auto request = MakeRequest(CollectiveKind::kBroadcast, "weights", DType::kFloat32);
  AddTensor(request.get(), data.data(), data.data(), {10});
  const Done sent = ranks.Submit(0, std::move(request));
  ranks.Settle();
  CHECK_EQ(TextOf(sent), std::string("ok"));
  Join(&ranks, 0, &rounds[0]);
  ranks.Settle();
  CHECK_EQ(TextOf(rounds[0].joined), std::string("ok"));
  CHECK_EQ(TextOf(rounds[1].joined), std::string("under way"));
  ranks[0].Leave(ranks.now_us);  // it has done its part
  ranks.Settle();
  ranks.data_open[1] = true;
  ranks.Settle();
  CHECK_EQ(TextOf(rounds[1].joined), std::string("ok"));
  CHECK(!ranks[1].busy());
  CHECK_OK(ranks[1].failure());
}

TEST(a_rank_that_hears_no_more_of_its_leader_gives_up) {
  std::map<int, ProcessState> processes = {{0, ProcessState::kRunning},
                                           {1, ProcessState::kRunning}};
  HandDriven ranks(2, TestConfig(), &processes);
  Round rounds[2];
  Join(&ranks, 1, &rounds[1]);
  ranks.Settle();
  ranks.control_open[1] = false;
  Join(&ranks, 0, &rounds[0]);
  ranks.Settle();
  ranks.Pass(15 * 1000 * 1000);
  CHECK_EQ(TextOf(rounds[1].joined), std::string("under way"));
  ranks.Pass(30 * 1000 * 1000);
  CHECK_CONTAINS(TextOf(rounds[1].joined), "join \"join\" got no answer from the leader, rank 0");
}

// Sends as rank 0, the leader, what only a broken one can say.
void Say(HandDriven* ranks, FrameType type, const std::string& bytes) {
  Link& link = *(*ranks)[0].links()[1];
  const MutableByteSpan room = link.BeginSend(Lane::kControl, bytes.size());
  std::memcpy(room.data(), bytes.data(), bytes.size());
  FrameHeader header;
  header.type = static_cast<uint8_t>(type);
  link.CommitSend(Lane::kControl, header);
}

RequestInfo Allreduce(DType dtype, int64_t elements) {
  RequestInfo info;
  info.key = "x";
  info.kind = CollectiveKind::kAllreduce;
  info.dtype = dtype;
  info.op = ReduceOp::kAverage;
  info.timeout_s = 5;
  info.shapes = {{elements}};
  info.sizes = {elements};
  info.hints = {0};
  return info;
}

TEST(what_a_leader_can_not_have_meant_ends_the_work) {
  struct Case {
    FrameType type;
    std::string bytes;
    const char* error;
  };
  const auto announce = [](std::vector<int32_t> joined, std::vector<RequestInfo> infos) {
    Response response;
    response.ticket = 1;
    response.joined = std::move(joined);
    response.keys.assign(infos.size(), "x");
    response.infos = std::move(infos);
    return EncodeResponse(response);
  };
  RequestInfo late = Allreduce(DType::kFloat32, 5);
  late.timeout_s = 1e300;
  RequestInfo anything = Allreduce(DType::kInvalid, 5);
  RequestInfo unlike = Allreduce(DType::kBool, 5);
  RequestInfo step = Allreduce(DType::kFloat32, 5);
  step.group = "w";
  step.bucket_count = 1 << 30;
  const RequestInfo small = Allreduce(DType::kUint8, 100000);
  const RequestInfo large = Allreduce(DType::kFloat64, 5);
  const WaitNote order{PredictedTicket(1, 0, 1), 0, large};
  for (const Case& wrong : std::vector<Case>{
           {FrameType::kResponse, announce({0, 1}, {large}), "does not parse"},
           {FrameType::kResponse, announce({1, 1}, {large}), "does not parse"},
           {FrameType::kResponse, announce({7}, {large}), "does not parse"},
           {FrameType::kResponse, announce({1}, {late}), "does not parse"},
           {FrameType::kResponse, announce({1}, {step}), "does not parse"},
           {FrameType::kResponse, announce({1}, {anything}), "is not supported"},
           {FrameType::kResponse, announce({1}, {unlike}), "made an invalid request"},
           {FrameType::kResponse, announce({1}, {large, small}), "can't be fused"},
           {FrameType::kTakePart, EncodeWait(order), "can't be next here"},
           {FrameType::kJoin, EncodeJoin({1, 5, {}, 0, 0}), "does not parse"},
           {FrameType::kJoinEnd, EncodeJoin({1, 5, {}, 3, 0}), "does not parse"},
           {FrameType::kJoinEnd, EncodeJoin({9, 5, {}, 1, 0}), "does not parse"},
       }) {
    HandDriven ranks(2, TestConfig());
    Round round;
    Join(&ranks, 1, &round);
    ranks.Poll(1);
    Say(&ranks, wrong.type, wrong.bytes);
    ranks.Poll(1);
    CHECK_CONTAINS(ranks[1].failure().message(), wrong.error);
    CHECK_CONTAINS(TextOf(round.joined), wrong.error);
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
