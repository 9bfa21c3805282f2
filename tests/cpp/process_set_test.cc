// Process sets: agreeing on them, who may use them, and that they never wait for each other.
#include "scheduler/process_set.h"

#include <algorithm>
#include <random>

#include "buckets.h"

namespace tfdist {
namespace {

uint32_t AddSet(Runtime& runtime, const std::vector<int32_t>& ranks) {
  uint32_t id = 0;
  CHECK_OK(runtime.AddProcessSet(ranks, 0, &id));
  return id;
}

TEST(pairs_have_ids_without_agreement) {
  for (int size : {2, 3, 7}) {
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        CHECK(PairSetRanks(PairSetId(a, b), size) == std::vector<int32_t>({a, b}));
      }
    }
  }
  CHECK(PairSetRanks(0, 4).empty() && PairSetRanks(9, 4).empty());
  CHECK(PairSetRanks(PairSetId(1, 4), 4).empty() && PairSetRanks(~0u, 4).empty());
  const int most = 65536;
  for (const int b : {most - 1, most - 2, 46342, 46341, 1}) {
    for (const int a : {0, b / 2, b - 1}) {
      CHECK(PairSetRanks(PairSetId(a, b), most) == std::vector<int32_t>({a, b}));
    }
  }
  CHECK(PairSetRanks(~0u, most).empty());
}

TEST(members_keep_their_hosts) {
  const std::vector<int32_t> host_of = {0, 1, 1, 0, 2};
  CHECK(SetHosts({0, 1, 2, 3, 4}, host_of) == host_of);
  CHECK(SetHosts({1, 2}, host_of) == std::vector<int32_t>({1, 1}));  // all on one host
  CHECK(SetHosts({4, 0}, host_of) == std::vector<int32_t>({2, 0}));
  CHECK(SetHosts({4, 0}, {}).empty());
}

TEST(lists_of_ranks_come_back_as_they_were_written) {
  for (const auto& ranks : std::vector<std::vector<int32_t>>{{0}, {0, 5}, {3, -1, 3}, {}}) {
    CHECK(ParseSetRanks(SetRanksText(ranks)) == ranks);
  }
  for (const char* text : {"a", "1,", ",1", "1 ,2", "01", "1,,2", "99999999999"}) {
    CHECK_EQ_IN(ParseSetRanks(text).empty(), true, text);
  }
}

TEST(ids_differ_between_generations_and_are_not_used_twice) {
  SetTable first(4, 1);
  SetTable second(4, 2);
  uint64_t a = 0;
  uint64_t b = 0;
  uint64_t again = 0;
  CHECK_OK(first.Add("0,1", &a));
  CHECK_OK(second.Add("0,1", &b));
  CHECK(a != b && a != 0 && b != 0);
  CHECK_OK(first.Add("0,1", &again));
  CHECK_EQ(again, a);
  CHECK_OK(first.Remove(std::to_string(a)));
  CHECK(!first.Remove(std::to_string(a)).ok());
  CHECK_OK(first.Add("0,1", &again));
  CHECK(again != a);
}

TEST(all_ranks_learn_one_id_and_members_reduce_among_themselves) {
  for (const char* transport : {"inproc", "shm", "tcp"}) {
    Ranks ranks(4, transport);
    ranks.Each([&](int rank) {
      const uint32_t odd = AddSet(ranks[rank], {1, 3});
      CHECK_EQ(AddSet(ranks[rank], {1, 3}), odd);
      const uint32_t rest = AddSet(ranks[rank], {0, 2});
      CHECK(odd != rest);
      const uint32_t own = rank % 2 == 1 ? odd : rest;
      std::vector<float> data(5000, static_cast<float>(rank + 1));
      auto request = MakeRequest(CollectiveKind::kAllreduce, "x", DType::kFloat32);
      request->info.set = own;
      request->info.op = ReduceOp::kAverage;
      AddTensor(request.get(), data.data(), data.data(), {5000});
      CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
      CHECK(data == std::vector<float>(5000, rank % 2 == 1 ? 3.0f : 2.0f));
      request = MakeRequest(CollectiveKind::kBroadcast, "b", DType::kFloat32);
      request->info.set = own;
      request->info.root = rank % 2 == 1 ? 3 : 0;  // a rank of the world
      std::fill(data.begin(), data.end(), static_cast<float>(rank));
      AddTensor(request.get(), data.data(), data.data(), {5000});
      CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
      CHECK(data == std::vector<float>(5000, rank % 2 == 1 ? 3.0f : 0.0f));
    });
  }
}

TEST(lists_that_differ_or_are_not_valid_are_an_error_on_every_rank) {
  Ranks ranks(3, "inproc");
  const std::vector<std::vector<int32_t>> bad = {{}, {1, 0}, {1, 1}, {0, 3}, {-1}};
  ranks.Each([&](int rank) {
    uint32_t id = 0;
    Status status = ranks[rank].AddProcessSet(
        rank == 1 ? std::vector<int32_t>{0, 1, 2} : std::vector<int32_t>{0, 1}, 0, &id);
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_CONTAINS(status.message(), "ranks 0,2: [0,1]; rank 1: [0,1,2]");
    for (const auto& list : bad) {
      status = ranks[rank].AddProcessSet(list, 0, &id);
      CHECK(status.code() == Code::kInvalidArgument);
      CHECK_CONTAINS(status.message(), "got [" + SetRanksText(list) + "] on all ranks");
    }
    // One rank adds, the others remove.
    status =
        rank == 0 ? ranks[rank].AddProcessSet({0, 1}, 0, &id) : ranks[rank].RemoveProcessSet(1, 0);
    CHECK_CONTAINS(status.message(), "rank 0: add_process_set; ranks 1,2: remove_process_set");
    AddSet(ranks[rank], {0, 1});  // and all goes on
  });
}

TEST(only_members_may_use_a_set) {
  Ranks ranks(3, "inproc");
  ranks.Each([&](int rank) {
    const uint32_t set = AddSet(ranks[rank], {0, 2});
    auto barrier = MakeRequest(CollectiveKind::kBarrier, "b");
    barrier->info.set = set;
    if (rank == 1) {
      const Status status = Start(ranks[rank], std::move(barrier)).Wait();
      CHECK(status.code() == Code::kInvalidArgument);
      CHECK_CONTAINS(status.message(), "rank 1 is not in process set");
      CHECK_CONTAINS(status.message(), "ranks 0,2");
    } else {
      CHECK_OK(Start(ranks[rank], std::move(barrier)).Wait());
      float data = 0;
      auto request = MakeRequest(CollectiveKind::kBroadcast, "r", DType::kFloat32);
      request->info.set = set;
      request->info.root = 1;
      AddTensor(request.get(), &data, &data, {1});
      const Status status = Start(ranks[rank], std::move(request)).Wait();
      CHECK_CONTAINS(status.message(), "root must be in ranks 0,2, got 1");
    }
    barrier = MakeRequest(CollectiveKind::kBarrier, "b");
    barrier->info.set = 4711;
    const Status unknown = Start(ranks[rank], std::move(barrier)).Wait();
    CHECK_CONTAINS(unknown.message(), "is not known");
    CHECK_OK(Start(ranks[rank], MakeRequest(CollectiveKind::kBarrier, "all")).Wait());
  });
}

TEST(a_set_in_use_is_not_removed_and_a_removed_one_is_not_used) {
  Ranks ranks(3, "inproc");
  uint32_t set = 0;
  ranks.Each([&](int rank) {
    const uint32_t own = AddSet(ranks[rank], {0, 1});
    if (rank == 0) set = own;
    for (uint32_t wrong : {0u, 4711u}) {
      const Status status = ranks[rank].RemoveProcessSet(wrong, 0);
      CHECK(status.code() == Code::kInvalidArgument);
      CHECK_CONTAINS(status.message(), "process set " + std::to_string(wrong));
    }
  });
  const auto barrier = [&] {
    auto request = MakeRequest(CollectiveKind::kBarrier, "b");
    request->info.set = set;
    return request;
  };
  Pending waits = Start(ranks[1], barrier());
  ranks.Each([&](int rank) {
    const Status status = ranks[rank].RemoveProcessSet(set, 0);
    CHECK(status.code() == Code::kFailedPrecondition);
    CHECK_CONTAINS(status.message(), "rank 1 still has operations of it in flight");
  });
  CHECK_OK(Start(ranks[0], barrier()).Wait());
  CHECK_OK(waits.Wait());
  ranks.Each([&](int rank) {
    CHECK_OK(ranks[rank].RemoveProcessSet(set, 0));
    CHECK(!Start(ranks[rank], barrier()).Wait().ok());
    CHECK(AddSet(ranks[rank], {0, 1}) != set);
  });
}

// A member may use a set before its leader has heard that there is one, and a word about waiting
// may come when the set is gone.
TEST(sets_come_and_go_under_use) {
  for (const char* transport : {"inproc", "tcp"}) {
    Ranks ranks(4, transport);
    ranks.Each([&](int rank) {
      for (int round = 0; round < 150; ++round) {
        const uint32_t set = AddSet(ranks[rank], {1, 2, 3});
        if (rank > 0) {
          std::vector<float> data(3000, 1.0f);
          auto request = MakeRequest(CollectiveKind::kAllreduce, "x", DType::kFloat32);
          request->info.set = set;
          AddTensor(request.get(), data.data(), data.data(), {3000});
          CHECK_OK(Start(ranks[rank], std::move(request)).Wait());
          CHECK(data == std::vector<float>(3000, 3.0f));
        }
        CHECK_OK(ranks[rank].RemoveProcessSet(set, 0));
      }
    });
  }
}

TEST(a_deadline_in_a_set_names_its_missing_rank) {
  Config config = TestConfig();
  config.timeout_s = 0.3;
  Ranks ranks(3, "inproc", config);
  ranks.Each([&](int rank) { AddSet(ranks[rank], {1, 2}); });
  auto request = MakeRequest(CollectiveKind::kBarrier, "b");
  request->info.set = (7u << 16) + 1;
  const Status status = Start(ranks[1], std::move(request)).Wait();
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK_CONTAINS(status.message(), "for rank 2");
  CHECK_CONTAINS(status.message(), "process set");
}

// ---- overlapping sets ----

struct Job {
  size_t set;  // index
  int number;
};

// 10^4 operations on three sets that overlap, of four kinds, some predicted; every rank submits its
// part in an order of its own.
TEST(overlapping_sets_in_any_order_neither_deadlock_nor_mix_up) {
  const std::vector<std::vector<int32_t>> sets = {{0, 1, 2}, {1, 2, 3}, {0, 3}};
  constexpr int kRounds = 50;
  constexpr int kJobs = 201;  // a round: a third each set
  for (const char* transport : {"inproc", "shm"}) {
    Config config = TestConfig();
    config.max_active = 2;
    config.shm_slots = 2;
    config.fusion_bytes = 4096;
    Ranks ranks(4, transport, config);
    const auto all_rounds = [&](int rank) {
      std::vector<uint32_t> ids;
      std::vector<std::string> groups;
      for (const auto& set : sets) ids.push_back(AddSet(ranks[rank], set));
      for (size_t s = 0; s < sets.size(); ++s) {
        const bool member = std::count(sets[s].begin(), sets[s].end(), rank) > 0;
        groups.push_back(member ? Register(ranks[rank], "w float32 [999]", ids[s]) : "");
      }
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < kRounds; ++round) {
        std::vector<Job> jobs;
        for (int i = 0; i < kJobs; ++i) {
          const size_t s = static_cast<size_t>(i) % sets.size();
          if (!groups[s].empty()) jobs.push_back({s, i});
        }
        std::shuffle(jobs.begin(), jobs.end(), random);
        std::vector<std::vector<float>> data(jobs.size());
        std::vector<std::vector<float>> rows(jobs.size());
        std::vector<Pending> pending;
        for (size_t j = 0; j < jobs.size(); ++j) {
          const auto [s, number] = jobs[j];
          const int kind = number / 3 % 4;
          data[j].assign(static_cast<size_t>(1 + number * 17 % 3001),
                         static_cast<float>(number + rank));
          std::unique_ptr<Request> request;
          const std::string name = "x" + std::to_string(number);
          const auto elements = static_cast<int64_t>(data[j].size());
          if (kind == 0) {
            request = Bucket(groups[s], number, kJobs, &data[j], ids[s]);
          } else if (kind == 1) {
            request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
            AddTensor(request.get(), data[j].data(), data[j].data(), {elements});
          } else if (kind == 2) {
            request = MakeRequest(CollectiveKind::kBroadcast, name, DType::kFloat32);
            request->info.root = sets[s].back();
            AddTensor(request.get(), data[j].data(), data[j].data(), {elements});
          } else {
            request = MakeRequest(CollectiveKind::kAllgather, name, DType::kFloat32);
            AddTensor(request.get(), data[j].data(), nullptr, {elements});
            rows[j].resize(data[j].size() * sets[s].size());
            request->allocate = [&rows, j](const std::vector<int64_t>&, int64_t) {
              return rows[j].data();
            };
          }
          request->info.set = ids[s];
          pending.push_back(Start(ranks[rank], std::move(request)));
        }
        for (size_t j = 0; j < jobs.size(); ++j) {
          CHECK_OK(pending[j].Wait());
          const auto [s, number] = jobs[j];
          const int kind = number / 3 % 4;
          float sum = 0;
          for (int32_t member : sets[s]) sum += static_cast<float>(number + member);
          if (kind == 2) sum = static_cast<float>(number + sets[s].back());
          if (kind < 3) CHECK(data[j] == std::vector<float>(data[j].size(), sum));
          for (size_t i = 0; kind == 3 && i < rows[j].size(); ++i) {
            CHECK_EQ(rows[j][i], static_cast<float>(number + sets[s][i / data[j].size()]));
          }
        }
      }
    };
    ranks.Each(all_rounds, 3 * kWaitSeconds);
  }
}

// ---- by hand ----

// Rank 2 never takes part in the world's operation, whose frames fill the link between ranks 0 and
// 1: a set of these two works on, through the same link.
TEST(a_set_that_stands_still_holds_up_no_other_on_the_same_link) {
  for (int64_t max_active : {int64_t{1}, int64_t{16}}) {
    Config config = TestConfig();
    config.max_active = max_active;
    config.shm_slots = 2;
    Ranks ranks(3, "shm", config);
    std::vector<std::string> group(3);
    std::vector<uint32_t> pair(3);
    constexpr size_t kElements = 300000;  // far more segments than a link has slots
    ranks.Each([&](int rank) {
      const auto r = static_cast<size_t>(rank);
      pair[r] = AddSet(ranks[rank], {0, 1});
      group[r] = Register(ranks[rank], "w float32 [1]");
      std::vector<float> data(kElements, 1.0f);
      CHECK_OK(Start(ranks[rank], Bucket(group[r], 0, 1, &data)).Wait());
    });
    std::vector<std::vector<float>> stuck(2, std::vector<float>(kElements, 1.0f));
    Pending first = Start(ranks[0], Bucket(group[0], 0, 1, &stuck[0]));
    std::vector<std::thread> threads;
    // Rank 1 first finds frames of an operation it has not submitted, then submits it.
    std::vector<float> small(20000, 1.0f);
    std::vector<float> other(20000, 2.0f);
    const auto both = [&] {
      std::fill(small.begin(), small.end(), 1.0f);
      std::fill(other.begin(), other.end(), 2.0f);
      auto a = MakeRequest(CollectiveKind::kAllreduce, "s", DType::kFloat32);
      auto b = MakeRequest(CollectiveKind::kAllreduce, "s", DType::kFloat32);
      AddTensor(a.get(), small.data(), small.data(), {20000});
      AddTensor(b.get(), other.data(), other.data(), {20000});
      a->info.set = b->info.set = pair[0];
      Pending pa = Start(ranks[0], std::move(a));
      Pending pb = Start(ranks[1], std::move(b));
      CHECK_OK(pa.Wait());
      CHECK_OK(pb.Wait());
      CHECK(small == std::vector<float>(20000, 3.0f) && other == small);
    };
    for (int i = 0; i < 20; ++i) both();
    Pending second = Start(ranks[1], Bucket(group[1], 0, 1, &stuck[1]));
    for (int i = 0; i < 20; ++i) both();
    std::vector<float> last(kElements, 1.0f);
    CHECK_OK(Start(ranks[2], Bucket(group[2], 0, 1, &last)).Wait());
    CHECK_OK(first.Wait());
    CHECK_OK(second.Wait());
    CHECK(last == std::vector<float>(kElements, 3.0f) && stuck[0] == last && stuck[1] == last);
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
