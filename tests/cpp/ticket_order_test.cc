// Tickets, their order, and what a rank remembers of its buckets.
#include "scheduler/ticket_order.h"

#include <functional>
#include <set>

#include "check.h"

namespace tfdist {
namespace {

RequestInfo Info(int64_t elements) {
  RequestInfo info;
  info.key = "g.0";
  info.kind = CollectiveKind::kAllreduce;
  info.dtype = DType::kFloat32;
  info.bucket = true;
  info.timeout_s = 5;
  info.shapes = {{elements}};
  return info;
}

TEST(a_predicted_ticket_holds_group_bucket_and_sequence) {
  for (uint32_t group : {1u, 2u, kMaxGroupNumber}) {
    for (int64_t bucket : {0, 1, 65535}) {
      for (uint64_t sequence : {uint64_t{0}, uint64_t{7}, uint64_t{0xffffffff}}) {
        const uint64_t ticket = PredictedTicket(group, bucket, sequence);
        CHECK(IsPredicted(ticket));
        CHECK_EQ(TicketGroup(ticket), group);
        CHECK_EQ(TicketBucket(ticket), static_cast<uint32_t>(bucket));
        CHECK_EQ(TicketSequence(ticket), static_cast<uint32_t>(sequence));
      }
    }
  }
  CHECK(!IsPredicted(1) && !IsPredicted(uint64_t{1} << 40));
}

TEST(numbers_that_do_not_fit_have_no_ticket) {
  CHECK_EQ(PredictedTicket(0, 0, 1), uint64_t{0});
  CHECK_EQ(PredictedTicket(kRepeatedGroup + 1, 0, 1), uint64_t{0});
  CHECK_EQ(PredictedTicket(1, -1, 1), uint64_t{0});
  CHECK_EQ(PredictedTicket(1, 65536, 1), uint64_t{0});
  CHECK_EQ(PredictedTicket(1, 0, uint64_t{1} << 32), uint64_t{0});
}

TEST(announced_tickets_go_first_then_sequence_group_bucket) {
  const std::vector<uint64_t> in_order = {1,
                                          2,
                                          uint64_t{1} << 62,
                                          PredictedTicket(1, 0, 1),
                                          PredictedTicket(1, 1, 1),
                                          PredictedTicket(2, 0, 1),
                                          PredictedTicket(1, 0, 2),
                                          PredictedTicket(1, 9, 2),
                                          PredictedTicket(32767, 65535, 2),
                                          PredictedTicket(1, 0, 0xffffffff)};
  for (size_t i = 1; i < in_order.size(); ++i) {
    CHECK(TurnOf(in_order[i - 1]) < TurnOf(in_order[i]));
  }
  std::set<Turn> turns;
  for (uint64_t ticket : in_order) turns.insert(TurnOf(ticket));
  CHECK_EQ(turns.size(), in_order.size());
}

TEST(a_bucket_is_predictable_from_its_first_agreement_on_while_it_stays_the_same) {
  BucketBook book;
  const uint64_t first = book.Count(1, 0);
  CHECK_EQ(TicketSequence(first), 1u);
  CHECK(!book.Known(first) && !book.Predictable(first, Info(4)));
  book.Agree(first, Info(4));
  const uint64_t second = book.Count(1, 0);
  CHECK_EQ(TicketSequence(second), 2u);
  CHECK(book.Predictable(second, Info(4)));
  CHECK(!book.Predictable(second, Info(5)));
  CHECK(book.Known(second));
  CHECK(!book.Known(book.Count(1, 1)));
  CHECK(!book.Known(book.Count(2, 0)));
  CHECK(!book.Known(0) && !book.Predictable(0, Info(4)));
  book.Forget(second);
  CHECK(!book.Predictable(book.Count(1, 0), Info(4)));
}

TEST(what_repeats_is_counted_from_the_agreement_that_numbers_its_key) {
  BucketBook book;
  CHECK_EQ(book.CountRepeated("x"), uint64_t{0});
  const uint64_t agreed = book.NumberKey("x", 3);
  CHECK_EQ(agreed, PredictedTicket(kRepeatedGroup, 3, 0));
  book.Agree(agreed, Info(4));
  const uint64_t next = book.CountRepeated("x");
  CHECK_EQ(next, PredictedTicket(kRepeatedGroup, 3, 1));
  CHECK(book.Predictable(next, Info(4)) && !book.Predictable(next, Info(5)));
  CHECK_EQ(book.CountRepeated("x"), next + 1);
  CHECK_EQ(book.CountRepeated("y"), uint64_t{0});
  CHECK_EQ(book.GroupBytes(next), int64_t{0});  // what else a step reduces is not known
  CHECK(book.LastTickets() == std::vector<uint64_t>{next + 1});
  CHECK_EQ(TicketText(next), std::string("submission 1 of repeated allreduce 3"));
}

// Every field of a request that ranks must agree on, changed alone.
TEST(a_request_is_the_same_only_if_all_that_ranks_must_agree_on_is) {
  const std::vector<std::function<void(RequestInfo*)>> changes = {
      [](RequestInfo* i) { i->key = "other"; },
      [](RequestInfo* i) { i->kind = CollectiveKind::kBroadcast; },
      [](RequestInfo* i) { i->dtype = DType::kInt32; },
      [](RequestInfo* i) { i->op = ReduceOp::kMax; },
      [](RequestInfo* i) { i->root = 1; },
      [](RequestInfo* i) { i->peer = 1; },
      [](RequestInfo* i) { i->prescale = 0.5; },
      [](RequestInfo* i) { i->postscale = 0.5; },
      [](RequestInfo* i) { i->algorithm = "ring"; },
      [](RequestInfo* i) { i->bucket = !i->bucket; },
      [](RequestInfo* i) { i->shapes.push_back({}); },
      [](RequestInfo* i) { i->shapes[0].push_back(1); },
      [](RequestInfo* i) { i->splits = {4}; },
      [](RequestInfo* i) { i->description = "other"; },
      [](RequestInfo* i) { i->present = {1}; },
      [](RequestInfo* i) { i->sizes.push_back(0); },
      [](RequestInfo* i) { i->hints.push_back(0); },
      [](RequestInfo* i) { i->group = "other"; },
      [](RequestInfo* i) { i->bucket_index += 1; },
      [](RequestInfo* i) { i->bucket_count += 1; },
  };
  for (size_t c = 0; c < changes.size(); ++c) {
    RequestInfo other = Info(4);
    CHECK(SameRequest(other, Info(4)));
    changes[c](&other);
    CHECK(!SameRequest(other, Info(4)));
    // Nor is anything of it left in one that is used again.
    const size_t shapes = other.shapes.size();
    other.timeout_s = 99;
    other.predicted = 7;
    other.set = 3;
    other.repeats = true;
    other.Clear();
    RequestInfo fresh;
    fresh.shapes.resize(shapes);
    CHECK(SameRequest(other, fresh));
    CHECK_EQ(other.timeout_s + static_cast<double>(other.predicted + other.set), 0.0);
    CHECK(!other.repeats);
  }
  RequestInfo other = Info(4);
  other.timeout_s = 99;
  other.repeats = true;
  other.predicted = PredictedTicket(1, 0, 3);
  CHECK(SameRequest(other, Info(4)));
}

TEST(a_rank_knows_what_it_has_taken_part_in) {
  BucketBook book;
  for (int i = 0; i < 3; ++i) book.Count(1, 0);
  book.Count(1, 1);
  const std::vector<uint64_t> last = book.LastTickets();
  CHECK(TookPart(last, PredictedTicket(1, 0, 3)) && TookPart(last, PredictedTicket(1, 1, 1)));
  CHECK(!TookPart(last, PredictedTicket(1, 0, 4)) && !TookPart(last, PredictedTicket(1, 1, 2)));
  CHECK(!TookPart(last, PredictedTicket(2, 0, 1)) && !TookPart({}, PredictedTicket(1, 0, 1)));
  CHECK(book.Submitted(PredictedTicket(1, 0, 3)) && !book.Submitted(PredictedTicket(1, 0, 4)));
}

TEST(the_bytes_of_a_group_are_those_of_its_agreed_buckets) {
  BucketBook book;
  const uint64_t ticket = PredictedTicket(2, 0, 1);
  CHECK_EQ(book.GroupBytes(ticket), int64_t{0});
  RequestInfo info = Info(4);
  info.dtype = DType::kFloat32;
  info.shapes = {{3, 5}, {}};
  book.Agree(ticket, info);
  book.Agree(PredictedTicket(1, 0, 1), info);
  book.Agree(PredictedTicket(3, 0, 1), info);
  CHECK_EQ(book.GroupBytes(ticket), int64_t{64});
  info.dtype = DType::kFloat16;
  info.shapes = {{7}};
  book.Agree(PredictedTicket(2, 5, 1), info);
  CHECK_EQ(book.GroupBytes(PredictedTicket(2, 5, 9)), int64_t{78});
  book.Forget(ticket);
  CHECK_EQ(book.GroupBytes(ticket), int64_t{14});
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
