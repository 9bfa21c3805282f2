// How the leader handles predicted operations that stand still.
#include "scheduler/stall_tracker.h"

#include "check.h"

namespace tfdist {
namespace {

constexpr int64_t kSecond = 1000 * 1000;
const uint64_t kTicket = PredictedTicket(1, 0, 7);

RequestInfo Info(int64_t elements = 4) {
  RequestInfo info;
  info.key = "g.0";
  info.kind = CollectiveKind::kAllreduce;
  info.dtype = DType::kFloat32;
  info.bucket = true;
  info.predicted = kTicket;
  info.timeout_s = 10;
  info.shapes = {{elements}};
  return info;
}

RequestInfo List(const std::string& key, const std::string& description) {
  RequestInfo info;
  info.key = key;
  info.kind = CollectiveKind::kRegister;
  info.timeout_s = 10;
  info.description = description;
  info.present = {1};
  return info;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(the_first_rank_that_waits_has_the_others_asked) {
  StallTracker tracker({0, 2, 5});
  CHECK(tracker.Add(2, kTicket, Info(), 0));
  CHECK(!tracker.Add(0, kTicket, Info(), 0));
  CHECK(!tracker.empty());
  tracker.OnAnswer(5, kTicket, StallTracker::Answer::kRunning);
  CHECK(tracker.empty());
}

TEST(a_rank_that_comes_late_or_an_end_anywhere_ends_the_wait) {
  StallTracker tracker({0, 1, 2});
  tracker.Add(0, kTicket, Info(), 0);
  tracker.OnAnswer(1, kTicket, StallTracker::Answer::kRunning);
  tracker.OnAnswer(2, kTicket, StallTracker::Answer::kNotSubmitted);
  CHECK(!tracker.empty());
  tracker.OnAnswer(2, kTicket, StallTracker::Answer::kRunning);
  CHECK(tracker.empty());
  tracker.Add(0, kTicket, Info(), 0);
  tracker.OnAnswer(1, kTicket, StallTracker::Answer::kDone);
  CHECK(tracker.empty());
  tracker.OnAnswer(2, kTicket, StallTracker::Answer::kDone);  // of nothing: ignored
}

TEST(stalls_and_deadlines_name_who_is_missing) {
  StallTracker tracker({0, 1, 2, 3});
  tracker.Add(1, kTicket, Info(), 0);
  tracker.OnAnswer(0, kTicket, StallTracker::Answer::kRunning);
  tracker.OnAnswer(2, kTicket, StallTracker::Answer::kNotSubmitted);
  tracker.OnAnswer(3, kTicket, StallTracker::Answer::kNotSubmitted);
  CHECK(tracker.TakeStalls(kSecond, 2 * kSecond).empty());
  const auto stalls = tracker.TakeStalls(3 * kSecond, 2 * kSecond);
  CHECK_EQ(stalls.size(), size_t{1});
  CHECK_EQ(stalls[0].text, "allreduce \"g.0\" has waited 3.0 s for ranks 2,3");
  CHECK(!tracker.Expired(10 * kSecond).has_value());
  CHECK(tracker.Expired(11 * kSecond).has_value());
  CHECK(tracker.Expired(11 * kSecond)->missing == std::vector<int>({2, 3}));
}

TEST(a_rank_that_does_not_even_answer_is_missing_at_the_deadline) {
  StallTracker tracker({0, 1});
  tracker.Add(0, kTicket, Info(), 0);
  CHECK(!tracker.Expired(10 * kSecond + 1).has_value());
  CHECK(tracker.Expired(11 * kSecond)->missing == std::vector<int>({1}));
}

// An answer under way may name one rank more.
TEST(the_error_of_a_deadline_waits_a_moment_for_the_answers_of_all) {
  StallTracker tracker({0, 1, 2, 3});
  tracker.Add(1, kTicket, Info(), 0);
  tracker.OnAnswer(2, kTicket, StallTracker::Answer::kRunning);
  tracker.OnAnswer(0, kTicket, StallTracker::Answer::kNotSubmitted);
  CHECK(!tracker.Expired(10 * kSecond + kSecond / 5).has_value());
  tracker.OnAnswer(3, kTicket, StallTracker::Answer::kNotSubmitted);
  CHECK(tracker.Expired(10 * kSecond + kSecond / 5)->missing == std::vector<int>({0, 3}));
}

TEST(another_announcement_under_the_key_is_a_mismatch_at_once) {
  Negotiator negotiator(3, 0);
  StallTracker tracker({0, 1, 2});
  tracker.Add(0, kTicket, Info(), 0);
  tracker.Add(1, kTicket, Info(), 0);
  CHECK_OK(tracker.FindMismatch(negotiator, kSecond));
  CHECK_OK(negotiator.Add(2, Info(5), kSecond));
  const Status status = tracker.FindMismatch(negotiator, kSecond);
  CHECK(status.code() == Code::kFailedPrecondition);
  CHECK_EQ_IN(Contains(status.message(), "ranks 0,1: [4]; rank 2: [5]"), true, status.message());
}

TEST(another_count_of_steps_is_a_mismatch_too) {
  Negotiator negotiator(2, 0);
  StallTracker tracker({0, 1});
  tracker.Add(0, kTicket, Info(), 0);
  RequestInfo earlier = Info();
  earlier.predicted = PredictedTicket(1, 0, 6);
  CHECK_OK(negotiator.Add(1, earlier, 0));
  const Status status = tracker.FindMismatch(negotiator, 0);
  CHECK_EQ_IN(Contains(status.message(), "rank 1: submission 6"), true, status.message());
}

// It is done with this one, and has changed the bucket since, as the others will.
TEST(a_rank_that_is_a_step_ahead_with_another_bucket_has_taken_part) {
  Negotiator negotiator(2, 0);
  StallTracker tracker({0, 1});
  tracker.Add(0, kTicket, Info(), 0);
  RequestInfo later = Info(5);
  later.predicted = PredictedTicket(1, 0, 8);
  CHECK_OK(negotiator.Add(1, later, 0));
  CHECK_OK(tracker.FindMismatch(negotiator, kSecond));
}

TEST(the_registration_of_another_list_is_a_mismatch_when_it_lasts) {
  Negotiator negotiator(2, 0);
  for (int rank : {0, 1}) CHECK_OK(negotiator.Add(rank, List("old", "w float32 [4]\nop"), 0));
  CHECK_EQ(negotiator.TakeResponses()[0].number, uint64_t{1});
  StallTracker tracker({0, 1});
  tracker.Add(0, kTicket, Info(), 0);
  tracker.OnAnswer(1, kTicket, StallTracker::Answer::kNotSubmitted);
  CHECK_OK(negotiator.Add(1, List("new", "v float32 [4]\nop"), 0));
  CHECK_OK(tracker.FindMismatch(negotiator, 0));
  CHECK_OK(tracker.FindMismatch(negotiator, kSecond / 2));
  const Status status = tracker.FindMismatch(negotiator, kSecond + kSecond / 2);
  CHECK(status.code() == Code::kFailedPrecondition);
  CHECK_EQ_IN(Contains(status.message(), "rank 0: \"w float32 [4]\"; rank 1: \"v float32 [4]\""),
              true, status.message());
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
