// FailureConsensus, driven by hand: who decides what, and who is out. tests/sim runs it under
// random faults; here stand the cases that have a name.
#include "membership/failure_consensus.h"

#include <deque>
#include <set>

#include "check.h"

namespace tfdist {
namespace {

constexpr int64_t kMs = 1000;

// Agreements of one generation and the messages between them.
struct Members {
  explicit Members(int size) {
    std::vector<int> all;
    for (int r = 0; r < size; ++r) all.push_back(r);
    commits.assign(all.size(), 0);
    for (int r : all) {
      machines.emplace_back(r, all, 5, [this, r] {
        return std::vector<CommitPoint>{{9, commits[static_cast<size_t>(r)]}};
      });
    }
  }
  FailureConsensus& operator[](int rank) { return machines[static_cast<size_t>(rank)]; }
  void Kill(int rank) {
    dead.insert(rank);
    for (int r = 0; r < static_cast<int>(machines.size()); ++r) {
      if (dead.count(r) == 0) See(r, rank, true);
    }
  }
  void See(int observer, int rank, bool certain) {
    (*this)[observer].AddEvidence({{rank, certain, "rank " + std::to_string(rank) + " is gone"}});
  }
  // Moves messages out of the machines; a dead rank sends nothing.
  void Collect() {
    for (int from = 0; from < static_cast<int>(machines.size()); ++from) {
      for (auto& [to, message] : (*this)[from].TakeMessages()) {
        if (dead.count(from) == 0) under_way.push_back({from, to, message});
      }
    }
  }
  struct Letter {
    int from;
    int to;
    FailureConsensus::Message message;
  };
  // Delivers everything, `times` times each, unless `lost` says otherwise.
  void Deliver(int times = 1, const std::function<bool(const Letter&)>& lost = nullptr) {
    for (Collect(); !under_way.empty(); Collect()) {
      const Letter letter = under_way.front();
      under_way.pop_front();
      if (dead.count(letter.to) > 0 || (lost && lost(letter))) continue;
      for (int n = 0; n < times; ++n) (*this)[letter.to].Receive(letter.from, *letter.message);
    }
  }
  void Wait(int64_t length_us) {
    for (int64_t passed_us = 0; passed_us <= length_us; passed_us += 100 * kMs) {
      now_us += 100 * kMs;
      for (FailureConsensus& machine : machines) machine.Tick(now_us);
    }
  }

  std::vector<int64_t> commits;
  std::deque<FailureConsensus> machines;
  std::deque<Letter> under_way;
  std::set<int> dead;
  int64_t now_us = 0;
};

TEST(a_rank_that_has_been_barred_is_out_instead_of_deciding) {
  bool barred = false;
  FailureConsensus consensus(
      0, {0, 1, 2}, 5, [] { return std::vector<CommitPoint>(); }, {}, [&] { return !barred; });
  barred = true;
  consensus.AddEvidence({{1, true, "it is gone"}, {2, true, "it is gone"}});
  CHECK(consensus.outcome() == Outcome::kEvicted);
  FailureConsensus free(
      0, {0, 1, 2}, 5, [] { return std::vector<CommitPoint>(); }, {}, [] { return true; });
  free.AddEvidence({{1, true, "it is gone"}, {2, true, "it is stopped"}, {kNoRank, true, "late"}});
  CHECK(free.outcome() == Outcome::kDecided);
  CHECK_EQ(free.verdict().culprit.rank, 1);
  CHECK_EQ(free.verdict().others.size(), size_t{1});
  CHECK_EQ(free.verdict().others[0].cause, std::string("it is stopped"));
}

TEST(survivors_of_a_death_decide_the_same) {
  for (int dead : {0, 1, 3}) {
    for (int times : {1, 3}) {
      Members members(4);
      members.commits = {6, 7, 6, 7};
      members.Kill(dead);
      members.Deliver(times);
      std::set<int> expected = {0, 1, 2, 3};
      expected.erase(dead);
      for (int r : expected) {
        CHECK(members[r].outcome() == Outcome::kDecided);
        const Verdict& verdict = members[r].verdict();
        CHECK(verdict == members[2].verdict());
        CHECK_EQ(verdict.culprit.rank, dead);
        CHECK_EQ(verdict.generation, 5u);
        CHECK_EQ(verdict.next_generation, 6u);
        CHECK(std::set<int>(verdict.survivors.begin(), verdict.survivors.end()) == expected);
        CHECK_EQ(verdict.commits.at(0).step, 7);
      }
    }
  }
}

TEST(what_only_the_dead_had_released_does_not_count) {
  Members members(3);
  members.commits = {6, 7, 6};
  members.Kill(1);
  members.Deliver();
  CHECK_EQ(members[0].verdict().commits.at(0).step, 6);
}

TEST(one_rank_alone_decides_when_all_others_are_known_to_be_gone) {
  Members members(4);
  for (int dead : {0, 1, 2}) members.Kill(dead);
  members.Deliver();
  CHECK(members[3].outcome() == Outcome::kDecided);
  CHECK_EQ(members[3].verdict().survivors.size(), size_t{1});
}

TEST(an_own_failure_is_everybodys_verdict_with_its_cause) {
  Members members(3);
  members[1].Withdraw("ValueError: negative learning rate");
  CHECK(members[1].outcome() == Outcome::kWithdrawn);
  members.Deliver();
  for (int r : {0, 2}) {
    CHECK(members[r].outcome() == Outcome::kDecided);
    CHECK_EQ(members[r].verdict().culprit.rank, 1);
    CHECK(members[r].verdict().culprit.certain);
    CHECK_EQ(members[r].verdict().culprit.cause, "ValueError: negative learning rate");
  }
}

TEST(a_failure_without_a_failed_rank_ends_the_generation_for_all) {
  Members members(3);
  members[2].AddEvidence({{kNoRank, true, "the deadline of \"g\" has passed"}});
  members.Deliver();
  for (int r : {0, 1, 2}) {
    CHECK(members[r].outcome() == Outcome::kDecided);
    CHECK_EQ(members[r].verdict().culprit.rank, kNoRank);
    CHECK_EQ(members[r].verdict().survivors.size(), size_t{3});
  }
}

TEST(a_majority_may_decide_on_suspicion_and_a_minority_may_not) {
  const auto suspects = [](std::vector<int> ranks) {
    std::vector<Evidence> evidence;
    for (int rank : ranks) evidence.push_back({rank, false, ""});
    return evidence;
  };
  CHECK(MayDecide({0, 1, 2, 3}, suspects({3})));
  CHECK(MayDecide({0, 1, 2, 3}, suspects({3, 2})));  // half, with the smallest rank
  CHECK(!MayDecide({0, 1, 2, 3}, suspects({1, 0})));
  CHECK(!MayDecide({0, 1, 2, 3}, suspects({0, 1, 2})));
  CHECK(!MayDecide({0, 1, 2}, suspects({0, 1})));
  CHECK(MayDecide({4, 7}, suspects({7})));
  CHECK(!MayDecide({4, 7}, suspects({4})));
  std::vector<Evidence> mixed = suspects({0, 1, 2});
  for (Evidence& item : mixed) item.certain = true;
  CHECK(MayDecide({0, 1, 2, 3}, mixed));
  mixed[1].certain = false;
  CHECK(!MayDecide({0, 1, 2, 3}, mixed));
  CHECK(MayDecide({0, 1}, {{kNoRank, false, ""}}));
}

TEST(of_a_partition_one_side_decides_and_the_other_has_no_majority) {
  Members members(5);
  const std::set<int> large = {1, 3, 4};
  for (int r = 0; r < 5; ++r) {
    std::vector<Evidence> evidence;
    for (int other = 0; other < 5; ++other) {
      if (large.count(r) != large.count(other)) evidence.push_back({other, false, "silent"});
    }
    members[r].AddEvidence(evidence);
  }
  members.Deliver(1, [&large](const Members::Letter& letter) {
    return large.count(letter.from) != large.count(letter.to);
  });
  members.Wait(700 * kMs);
  for (int r = 0; r < 5; ++r) {
    CHECK(members[r].outcome() == (large.count(r) > 0 ? Outcome::kDecided : Outcome::kNoMajority));
  }
  CHECK(members[3].verdict() == members[1].verdict());
}

TEST(new_evidence_does_not_keep_a_minority_waiting) {
  Members members(9);
  int64_t waited_us = 0;
  for (int other = 1; other < 9; ++other) {
    members.See(0, other, false);
    if (members[0].outcome() != Outcome::kNone) break;
    members.Wait(200 * kMs);
    waited_us += 300 * kMs;
  }
  CHECK(members[0].outcome() == Outcome::kNoMajority);
  CHECK(waited_us < 8 * 300 * kMs);
}

TEST(a_minority_that_learns_that_the_others_are_gone_decides) {
  Members members(3);
  for (int other : {0, 1}) members.See(2, other, false);
  members.Wait(200 * kMs);
  CHECK(members[2].outcome() == Outcome::kNone);
  for (int other : {0, 1}) members.See(2, other, true);
  CHECK(members[2].outcome() == Outcome::kDecided);
}

TEST(a_rank_that_only_seemed_dead_is_evicted) {
  Members members(3);
  members.See(0, 2, false);
  members.Deliver();
  CHECK(members[2].outcome() == Outcome::kEvicted);
  CHECK(members[0].outcome() == Outcome::kDecided);
  CHECK(members[1].outcome() == Outcome::kDecided);
}

TEST(a_minority_cannot_evict_a_majority) {
  // Rank 2 hears nobody, the others hear it.
  Members members(3);
  members[2].AddEvidence({{0, false, "silent"}, {1, false, "silent"}});
  members.Deliver(1, [](const Members::Letter& letter) { return letter.to == 2; });
  CHECK(members[0].outcome() == Outcome::kDecided);
  CHECK(members[1].outcome() == Outcome::kDecided);
  CHECK_EQ(members[0].verdict().culprit.rank, 2);
}

TEST(a_verdict_that_one_rank_may_know_survives_its_coordinator) {
  // Rank 0 decides, tells nobody, and is suspected; its verdict must come out all the same.
  Members members(5);
  members.commits = {3, 3, 4, 3, 3};
  members.Kill(3);
  members.Deliver(1, [](const Members::Letter& letter) {
    return letter.message->kind == ConsensusMessage::Kind::kDecide;
  });
  CHECK(members[0].outcome() == Outcome::kDecided);
  CHECK(members[1].outcome() == Outcome::kNone);
  const Verdict first = members[0].verdict();
  members.dead.insert(0);
  members.See(1, 0, false);
  members.Deliver();
  for (int r : {1, 2, 4}) {
    CHECK(members[r].outcome() == Outcome::kDecided);
    CHECK(members[r].verdict() == first);
  }
}

TEST(a_second_failure_before_the_decision_is_in_the_verdict) {
  Members members(4);
  members.Kill(3);
  members.Deliver(1, [](const Members::Letter& letter) {
    return letter.message->kind == ConsensusMessage::Kind::kPropose;
  });
  members.Kill(0);
  members.Deliver();
  CHECK(members[1].outcome() == Outcome::kDecided);
  CHECK_EQ(members[1].verdict().failed.size(), size_t{2});
  CHECK_EQ(members[1].verdict().culprit.rank, 3);
  CHECK(members[1].verdict() == members[2].verdict());
}

TEST(who_learns_a_decision_tells_it_to_everybody) {
  // The coordinator's own word reaches rank 1 alone.
  Members members(4);
  members.Kill(3);
  members.Deliver(1, [](const Members::Letter& letter) {
    return letter.from == 0 && letter.to == 2 &&
           letter.message->kind == ConsensusMessage::Kind::kDecide;
  });
  for (int r : {0, 1, 2}) CHECK(members[r].outcome() == Outcome::kDecided);
}

TEST(no_agreement_ends_within_the_bound_flagged_as_such) {
  Members members(4);
  members.Kill(3);
  members.Deliver(1, [](const Members::Letter& letter) { return letter.from == 2; });
  members.Wait(5500 * kMs);
  CHECK(members[0].outcome() == Outcome::kNone);
  members.Wait(800 * kMs);
  CHECK(members[0].outcome() == Outcome::kNotAgreed);
  CHECK_EQ(members[0].Seen().at(0).rank, 3);
}

TEST(strangers_and_other_generations_are_ignored) {
  Members members(3);
  members.See(0, 17, true);
  CHECK(!members[0].active());
  ConsensusMessage other;
  other.generation = 4;
  other.evidence = {{1, true, ""}};
  members[0].Receive(2, other);
  other.generation = 5;
  members[0].Receive(17, other);
  CHECK(!members[0].active());
  members[0].Receive(2, other);
  CHECK(members[0].active());
}

TEST(a_long_cause_is_cut) {
  Members members(2);
  members[1].Withdraw(std::string(1 << 20, 'x'));
  members.Deliver();
  CHECK_EQ(members[0].verdict().culprit.cause.size(), kMaxCause);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
