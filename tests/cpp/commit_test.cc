// The commit gate, driven by hand.
#include "membership/commit.h"

#include "check.h"

namespace tfdist {
namespace {

constexpr uint64_t kGroup = 77;

// Gates of one set and the messages between them, delivered when a test says so.
struct Gates {
  explicit Gates(const std::vector<int>& members) : members(members) {
    for (int rank : members) gates.emplace_back(rank, members);
  }
  CommitGate& operator[](int rank) {
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] == rank) return gates[i];
    }
    check::Fail(__FILE__, __LINE__, "no such member");
  }
  void Deliver(int times = 1) {
    for (bool moved = true; moved;) {
      moved = false;
      for (int from : members) {
        for (const auto& [to, message] : (*this)[from].TakeMessages()) {
          for (int n = 0; n < times; ++n) (*this)[to].Receive(from, message);
          moved = true;
        }
      }
    }
  }
  const std::vector<int> members;
  std::vector<CommitGate> gates;
};

size_t Released(CommitGate* gate) { return gate->TakeReleased().size(); }

TEST(nothing_is_released_before_all_have_completed) {
  Gates gates({1, 4, 6});
  CHECK_OK(gates[4].Complete(kGroup, 1));
  CHECK_OK(gates[1].Complete(kGroup, 1));
  gates.Deliver();
  for (int rank : gates.members) CHECK_EQ(Released(&gates[rank]), size_t{0});
  CHECK_EQ(gates[4].waiting(), 1);
  CHECK_OK(gates[6].Complete(kGroup, 1));
  gates.Deliver();
  for (int rank : gates.members) {
    CHECK_EQ(Released(&gates[rank]), size_t{1});
    CHECK_EQ(gates[rank].waiting(), 0);
  }
}

TEST(the_leader_knows_who_has_not_completed) {
  Gates gates({1, 4, 6});
  CHECK(gates[1].Missing(kGroup, 1) == std::vector<int>({1, 4, 6}));
  CHECK_OK(gates[4].Complete(kGroup, 1));
  gates.Deliver();
  CHECK(gates[1].Missing(kGroup, 1) == std::vector<int>({1, 6}));
  CHECK(gates[1].Missing(kGroup, 2) == std::vector<int>({1, 4, 6}));
  CHECK(gates[4].Missing(kGroup, 1).empty());  // as far as that one knows
  CHECK(gates[6].Missing(kGroup, 1) == std::vector<int>({6}));
}

TEST(messages_that_come_twice_change_nothing) {
  Gates gates({0, 1, 2});
  for (int64_t step = 1; step <= 3; ++step) {
    for (int rank : gates.members) CHECK_OK(gates[rank].Complete(kGroup, step));
    gates.Deliver(2);
    for (int rank : gates.members) CHECK_EQ(Released(&gates[rank]), size_t{1});
  }
}

TEST(a_set_of_one_releases_at_once) {
  CommitGate gate(3, {3});
  CHECK_OK(gate.Complete(kGroup, 1));
  CHECK_EQ(Released(&gate), size_t{1});
  CHECK(gate.TakeMessages().empty());
}

TEST(groups_are_apart) {
  Gates gates({0, 1});
  CHECK_OK(gates[0].Complete(1, 1));
  CHECK_OK(gates[1].Complete(2, 1));
  gates.Deliver();
  CHECK_EQ(Released(&gates[0]), size_t{0});
  CHECK_OK(gates[1].Complete(1, 1));
  gates.Deliver();
  const std::vector<CommitPoint> released = gates[0].TakeReleased();
  CHECK_EQ(released.size(), size_t{1});
  CHECK_EQ(released[0].group, uint64_t{1});
  CHECK_EQ(gates[1].waiting(), 1);  // group 2
}

TEST(a_commit_after_the_freeze_does_not_count_until_the_verdict_says_so) {
  Gates gates({0, 1, 2});
  for (int rank : gates.members) CHECK_OK(gates[rank].Complete(kGroup, 1));
  // The leader hears from both and announces; rank 1 reads it, rank 2 has reported before.
  for (int rank : {1, 2}) {
    for (const auto& [to, message] : gates[rank].TakeMessages()) gates[to].Receive(rank, message);
  }
  CHECK_EQ(gates[2].Freeze().at(0).step, 0);
  gates.Deliver();
  CHECK_EQ(Released(&gates[2]), size_t{0});
  CHECK_EQ(Released(&gates[1]), size_t{1});
  CHECK_EQ(gates[1].Freeze().at(0).step, 1);
  CHECK_OK(gates[2].Resolve({{kGroup, 1}}));
  CHECK_EQ(Released(&gates[2]), size_t{1});
  CHECK_OK(gates[1].Resolve({{kGroup, 1}}));
  CHECK_EQ(Released(&gates[1]), size_t{0});
}

TEST(what_no_survivor_released_is_discarded) {
  CommitGate gate(1, {0, 1});
  CHECK_OK(gate.Complete(kGroup, 1));
  CHECK_EQ(gate.Freeze().at(0).step, 0);
  CHECK_OK(gate.Resolve({{kGroup, 0}}));
  CHECK_EQ(Released(&gate), size_t{0});
  CHECK_EQ(gate.waiting(), 0);
}

TEST(a_frozen_leader_announces_nothing) {
  Gates gates({0, 1});
  CHECK_OK(gates[0].Complete(kGroup, 1));
  gates[0].Freeze();
  CHECK_OK(gates[1].Complete(kGroup, 1));
  gates.Deliver();
  for (int rank : gates.members) CHECK_EQ(Released(&gates[rank]), size_t{0});
}

TEST(only_the_leader_commits_and_only_members_count) {
  CommitGate gate(2, {0, 1, 2});
  CHECK_OK(gate.Complete(kGroup, 1));
  gate.Receive(1, {GateMessage::Kind::kCommit, kGroup, 1});
  gate.Receive(7, {GateMessage::Kind::kCommit, kGroup, 1});
  CHECK_EQ(Released(&gate), size_t{0});
  CommitGate leader(0, {0, 1});
  CHECK_OK(leader.Complete(kGroup, 1));
  leader.Receive(7, {GateMessage::Kind::kComplete, kGroup, 1});
  CHECK_EQ(Released(&leader), size_t{0});
}

TEST(impossible_orders_are_errors) {
  CommitGate gate(1, {0, 1});
  CHECK(!gate.Complete(kGroup, 2).ok());
  CHECK_OK(gate.Complete(kGroup, 1));
  CHECK(!gate.Complete(kGroup, 2).ok());  // step 1 was not released
  CHECK(!gate.Resolve({{kGroup, 2}}).ok());
  CHECK_EQ(Released(&gate), size_t{0});
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
