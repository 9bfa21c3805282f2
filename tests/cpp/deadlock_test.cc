// Which ranks wait for each other, and how it is told.
#include "scheduler/deadlock.h"

#include "check.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

using How = BlockedNote::How;
using Notes = std::map<int, BlockedNote>;

const std::vector<int32_t> kRanks = {0, 1, 2};
const uint64_t kStep = PredictedTicket(1, 0, 7);

BlockedWait ForKey(const std::string& key, std::vector<int32_t> ranks = kRanks) {
  return {ranks.size() == 3 ? 0u : 9u, std::move(ranks), 0, key};
}

// A rank that has submitted bucket 0 of group 1 `steps` times, and waits.
BlockedNote Note(std::vector<BlockedWait> waits, uint64_t steps, How how = How::kEager) {
  BlockedNote note;
  note.how = how;
  note.place = waits.empty() ? "" : "f (a.py:1)";
  note.waits = std::move(waits);
  note.took_part[0] = {PredictedTicket(1, 0, steps)};
  return note;
}

BlockedWait ForStep() { return {0, kRanks, kStep, "g.0"}; }

TEST(one_rank_in_a_step_and_the_others_in_another_call_are_a_knot) {
  const Notes notes = {{0, Note({ForKey("x")}, 6)},
                       {1, Note({ForStep()}, 7, How::kGraph)},
                       {2, Note({ForKey("x")}, 6)}};
  const std::vector<LedWait> led = {{0, "x", {1}}};
  const Deadlock deadlock = FindDeadlock(notes, led);
  CHECK(deadlock == (Deadlock{{0, {1}}, {1, {0, 2}}, {2, {1}}}));
  CHECK_EQ(DeadlockText(deadlock, notes),
           "ranks 0,2 wait in f (a.py:1) for rank 1 (\"x\"); rank 1 waits in f (a.py:1) for ranks "
           "0,2");
}

TEST(what_all_have_submitted_comes_to_an_end) {
  // A step that runs on all ranks; a key that the leader has announced, or is about to.
  Notes notes = {{0, Note({ForStep()}, 7)}, {1, Note({ForStep()}, 7)}, {2, Note({ForStep()}, 8)}};
  CHECK(FindDeadlock(notes, {}).empty());
  notes = {{0, Note({ForKey("x")}, 6)}, {1, Note({ForKey("y")}, 6)}, {2, Note({ForKey("y")}, 6)}};
  CHECK(FindDeadlock(notes, {{0, "y", {0}}}).empty());
}

TEST(a_rank_that_is_not_blocked_may_come) {
  const Notes notes = {{0, Note({ForKey("x")}, 6)}, {1, Note({ForKey("y")}, 6)}};
  CHECK(FindDeadlock(notes, {{0, "x", {2}}, {0, "y", {0, 2}}}).empty());
  // The two wait for each other also if rank 2 came.
  CHECK_EQ(FindDeadlock(notes, {{0, "x", {1, 2}}, {0, "y", {0, 2}}}).size(), 2u);
}

TEST(a_rank_with_something_that_can_end_is_not_part_of_it) {
  const Notes notes = {{0, Note({ForKey("x"), ForStep()}, 7)}, {1, Note({ForKey("y")}, 7)}};
  CHECK(FindDeadlock(notes, {{0, "x", {1}}, {0, "y", {0}}}).empty());
}

TEST(a_graph_may_submit_what_another_graph_waits_for) {
  for (How how : {How::kEager, How::kGraph, How::kPatient}) {
    const Notes notes = {{0, Note({ForKey("x")}, 6, how)},
                         {1, Note({ForKey("y")}, 6, How::kGraph)},
                         {2, Note({ForKey("y")}, 6, How::kEager)}};
    const Deadlock deadlock = FindDeadlock(notes, {{0, "x", {1}}, {0, "y", {0}}});
    CHECK_EQ(deadlock.empty(), how != How::kEager);
  }
  const Notes patient = {{0, Note({ForKey("x")}, 6, How::kPatient)},
                         {1, Note({ForKey("y")}, 6, How::kPatient)}};
  CHECK_EQ(FindDeadlock(patient, {{0, "x", {1}}, {0, "y", {0}}}).size(), 2u);
}

TEST(a_set_is_judged_by_what_its_leader_tells) {
  Notes notes = {{1, Note({ForKey("x", {1, 2})}, 6)}, {2, Note({ForKey("y", {1, 2})}, 6)}};
  CHECK(FindDeadlock(notes, {{9, "x", {2}}, {9, "y", {1}}}).empty());  // rank 0 does not lead it
  notes[1].led = {{9, "x", {2}}, {9, "y", {1}}};
  CHECK(FindDeadlock(notes, {}) == (Deadlock{{1, {2}}, {2, {1}}}));
}

TEST(operations_are_told_by_name_where_no_place_is_known) {
  Notes notes = {{0, Note({ForKey("x")}, 6)}, {1, Note({ForKey("y.eager")}, 6)}};
  notes[0].place = "";
  const Deadlock deadlock = FindDeadlock(notes, {{0, "x", {1}}, {0, "y.eager", {0}}});
  CHECK_EQ(DeadlockText(deadlock, notes),
           "rank 0 waits in \"x\" for rank 1; rank 1 waits in f (a.py:1) for rank 0");
}

TEST(a_note_travels_and_cut_ones_are_refused) {
  BlockedNote note = Note({ForKey("x", {1, 2}), ForStep()}, 7, How::kPatient);
  note.round = 3;
  note.moves = 11;
  note.led = {{9, "x", {2}}};
  const std::string bytes = EncodeBlocked(note);
  BlockedNote out;
  CHECK(DecodeBlocked(AsBytes(bytes), &out));
  CHECK(EncodeBlocked(out) == bytes);
  CHECK(out.round == 3 && out.moves == 11 && out.how == How::kPatient);
  CHECK(out.waits.size() == 2 && out.waits[1].ticket == kStep && out.led[0].missing[0] == 2);
  for (size_t n = 0; n < bytes.size(); ++n) {
    CHECK(!DecodeBlocked(AsBytes(bytes.substr(0, n)), &out));
  }
  uint32_t round = 0;
  CHECK(DecodeRound(AsBytes(EncodeRound(5)), &round) && round == 5);
  CHECK(!DecodeRound(AsBytes(EncodeRound(0)), &round));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
