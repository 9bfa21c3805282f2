// The leader's table, with time as an argument and no network.
#include "scheduler/negotiator.h"

#include <functional>

#include "check.h"

namespace tfdist {
namespace {

RequestInfo Allreduce(const std::string& key, std::vector<int64_t> shape = {4}) {
  RequestInfo info;
  info.key = key;
  info.kind = CollectiveKind::kAllreduce;
  info.dtype = DType::kFloat32;
  info.timeout_s = 10;
  info.shapes = {std::move(shape)};
  return info;
}

RequestInfo Register(const std::string& key, const std::string& description,
                     std::vector<uint8_t> present) {
  RequestInfo info;
  info.key = key;
  info.kind = CollectiveKind::kRegister;
  info.timeout_s = 10;
  info.description = description;
  info.present = std::move(present);
  return info;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(nothing_is_announced_before_every_rank_is_ready) {
  Negotiator n(3, 1 << 20);
  CHECK_OK(n.Add(2, Allreduce("a"), 0));
  CHECK_OK(n.Add(0, Allreduce("a"), 0));
  CHECK(n.TakeResponses().empty());
  CHECK(n.WaitsFor(1) && !n.WaitsFor(0));
  CHECK_OK(n.Add(1, Allreduce("a"), 0));
  const auto responses = n.TakeResponses();
  CHECK_EQ(responses.size(), size_t{1});
  CHECK_OK(responses[0].error);
  CHECK(!n.WaitsFor(1));
}

TEST(tickets_grow_in_order_of_completion) {
  Negotiator n(2, 0);
  for (const char* key : {"a", "b", "c"}) CHECK_OK(n.Add(0, Allreduce(key), 0));
  for (const char* key : {"c", "a", "b"}) CHECK_OK(n.Add(1, Allreduce(key), 0));
  const auto responses = n.TakeResponses();
  CHECK_EQ(responses.size(), size_t{3});
  CHECK_EQ(responses[0].keys[0], "c");
  CHECK_EQ(responses[2].keys[0], "b");
  CHECK(responses[0].ticket < responses[1].ticket && responses[1].ticket < responses[2].ticket);
}

TEST(a_rank_that_announces_twice_is_an_error) {
  Negotiator n(2, 0);
  CHECK_OK(n.Add(1, Allreduce("a"), 0));
  CHECK(!n.Add(1, Allreduce("a"), 0).ok());
}

TEST(disagreement_names_field_ranks_and_values) {
  struct Case {
    std::function<void(RequestInfo*)> change;
    const char* what;
    const char* value;
  };
  const std::vector<Case> cases = {
      {[](RequestInfo* i) { i->shapes = {{5}}; }, "the shape", "rank 1: [5]"},
      {[](RequestInfo* i) { i->dtype = DType::kInt32; }, "the dtype", "rank 1: int32"},
      {[](RequestInfo* i) { i->op = ReduceOp::kMax; }, "the reduction", "rank 1: max"},
      {[](RequestInfo* i) { i->kind = CollectiveKind::kBroadcast; }, "the operation",
       "rank 1: broadcast"},
      {[](RequestInfo* i) { i->postscale = 2; }, "the factors", "postscale 2"},
  };
  for (const Case& c : cases) {
    Negotiator n(3, 0);
    RequestInfo other = Allreduce("grad");
    c.change(&other);
    CHECK_OK(n.Add(0, Allreduce("grad"), 0));
    CHECK_OK(n.Add(1, other, 0));
    CHECK_OK(n.Add(2, Allreduce("grad"), 0));
    const auto responses = n.TakeResponses();
    const Status& error = responses[0].error;
    CHECK(error.code() == Code::kFailedPrecondition);
    CHECK_EQ_IN(Contains(error.message(), c.what), true, error.message());
    CHECK_EQ_IN(Contains(error.message(), c.value), true, error.message());
    CHECK_EQ_IN(Contains(error.message(), "ranks 0,2"), true, error.message());
    CHECK_EQ_IN(Contains(error.message(), "grad"), true, error.message());
    CHECK_EQ_IN(Contains(error.payload(), "\"kind\": \"mismatch\""), true, error.payload());
  }
}

TEST(what_is_announced_carries_the_rows_that_were_agreed_on) {
  RequestInfo info = Allreduce("x", {3, 2});
  info.kind = CollectiveKind::kAlltoall;
  Negotiator n(2, 0);
  info.splits = {1, 2};
  CHECK_OK(n.Add(0, info, 0));
  info.splits = {3, 0};
  CHECK_OK(n.Add(1, info, 0));
  const auto responses = n.TakeResponses();
  CHECK_OK(responses[0].error);
  CHECK(responses[0].rows == std::vector<int64_t>({1, 2, 3, 0}));
}

TEST(registration_collects_who_has_a_gradient) {
  Negotiator n(2, 0);
  CHECK_OK(n.Add(0, Register("g", "a\nb\nc", {1, 0, 0}), 0));
  CHECK_OK(n.Add(1, Register("g", "a\nb\nc", {0, 1, 0}), 0));
  const auto responses = n.TakeResponses();
  CHECK(responses[0].present == std::vector<uint8_t>({1, 1, 0}));
}

TEST(registrations_that_can_never_meet_are_refused_at_once) {
  Negotiator n(2, 0);
  CHECK_OK(n.Add(0, Register("g1", "a float32 [2]\n", {1}), 0));
  CHECK(n.TakeResponses().empty());
  CHECK_OK(n.Add(1, Register("g2", "a float32 [3]\n", {1}), 0));
  const auto responses = n.TakeResponses();
  CHECK_EQ(responses.size(), size_t{2});
  for (const Response& response : responses) {
    CHECK(response.error.code() == Code::kFailedPrecondition);
    CHECK(Contains(response.error.message(), "a float32 [3]"));
  }
}

TEST(registrations_of_lists_of_different_names_may_cross) {
  const std::string options = "op=average name=";
  Negotiator n(2, 0);
  CHECK_OK(n.Add(0, Register("g1", "a float32 [2]\n" + options + "one eager", {1}), 0));
  CHECK_OK(n.Add(1, Register("g2", "a float32 [3]\n" + options + "two eager", {1}), 0));
  CHECK(n.TakeResponses().empty());
  CHECK_OK(n.Add(1, Register("g1", "a float32 [2]\n" + options + "one eager", {1}), 0));
  CHECK_OK(n.Add(0, Register("g2", "a float32 [3]\n" + options + "two eager", {1}), 0));
  for (const Response& response : n.TakeResponses()) CHECK_OK(response.error);
  // Of one name, nothing but a mismatch can come of it.
  CHECK_OK(n.Add(0, Register("g3", "a float32 [4]\n" + options + "one eager", {1}), 0));
  CHECK_OK(n.Add(1, Register("g4", "a float32 [5]\n" + options + "one eager", {1}), 0));
  const auto responses = n.TakeResponses();
  CHECK_EQ(responses.size(), size_t{2});
  for (const Response& response : responses) CHECK(!response.error.ok());
}

TEST(stalls_name_the_missing_ranks_and_repeat) {
  Negotiator n(4, 0);
  CHECK_OK(n.Add(0, Allreduce("late"), 1000));
  CHECK_OK(n.Add(2, Allreduce("late"), 2000));
  CHECK(n.TakeStalls(500000, 1000000).empty());
  const auto stalls = n.TakeStalls(1500000, 1000000);
  CHECK_EQ(stalls.size(), size_t{1});
  CHECK(stalls[0].missing == std::vector<int>({1, 3}));
  CHECK_EQ_IN(Contains(stalls[0].text, "allreduce \"late\""), true, stalls[0].text);
  CHECK_EQ_IN(Contains(stalls[0].text, "ranks 1,3"), true, stalls[0].text);
  CHECK(n.TakeStalls(1600000, 1000000).empty());
  CHECK_EQ(n.TakeStalls(2600000, 1000000).size(), size_t{1});
}

TEST(a_key_expires_after_its_own_timeout) {
  Negotiator n(2, 0);
  CHECK_OK(n.Add(1, Allreduce("x"), 0));
  CHECK(!n.Expired(9000000).has_value());
  CHECK(n.Expired(10100000).has_value());
  CHECK(n.Expired(10100000)->missing == std::vector<int>({0}));
}

TEST(a_response_names_the_rank_that_came_last) {
  Negotiator n(3, 1 << 20);
  for (int rank : {2, 0, 1}) CHECK_OK(n.Add(rank, Allreduce("x"), 0));
  CHECK_EQ(n.TakeResponses()[0].last, 1);
  for (int rank : {1, 2, 0}) CHECK_OK(n.Add(rank, Allreduce("x"), 0));
  for (int rank : {0, 1, 2}) CHECK_OK(n.Add(rank, Allreduce("y"), 0));
  const auto fused = n.TakeResponses();
  CHECK_EQ(fused.size(), size_t{1});
  CHECK_EQ(fused[0].last, 2);
  CHECK_OK(n.Add(0, Allreduce("z"), 0));
  CHECK_OK(n.Add(1, Allreduce("z"), 0));
  n.Join(2);
  CHECK_EQ(n.TakeResponses()[0].last, 2);
}

const AlgorithmEntry* Row(const char* name) {
  return FindAlgorithm(CollectiveKind::kAllreduce, name, {0, 4, 0, {}}, DType::kFloat32);
}

TEST(fusion_joins_only_what_fits_together) {
  RequestInfo small = Allreduce("a", {100});  // 400 bytes
  RequestInfo other = small;
  other.op = ReduceOp::kMin;
  RequestInfo bucket = small;
  bucket.bucket = true;
  const AlgorithmOf any = [](const RequestInfo&) { return Row("pairwise"); };
  CHECK(FuseRequests({small, small, small}, 1000, any) == std::vector<int>({2, 1}));
  CHECK(FuseRequests({small, small, small}, 0, any) == std::vector<int>({1, 1, 1}));
  CHECK(FuseRequests({small, other, small}, 1 << 20, any) == std::vector<int>({1, 1, 1}));
  CHECK(FuseRequests({small, bucket, bucket, small}, 1 << 20, any) ==
        std::vector<int>({1, 1, 1, 1}));
}

TEST(fusion_joins_only_what_keeps_its_bits) {
  const RequestInfo small = Allreduce("a", {100});
  const RequestInfo large = Allreduce("b", {10000});
  RequestInfo asked = small;
  asked.algorithm = "ring";
  const auto by_size = [](const char* little, const char* much) -> AlgorithmOf {
    return [=](const RequestInfo& info) { return Row(info.shapes[0][0] < 1000 ? little : much); };
  };
  const std::vector<RequestInfo> mixed = {small, small, large, small};
  CHECK(FuseRequests(mixed, 1 << 20, by_size("butterfly", "ring")) == std::vector<int>({2, 1, 1}));
  // These add in the same order.
  CHECK(FuseRequests(mixed, 1 << 20, by_size("star", "pairwise")) == std::vector<int>({4}));
  CHECK(FuseRequests(mixed, 1 << 20, by_size("butterfly", "halving_doubling")) ==
        std::vector<int>({4}));
  CHECK(FuseRequests({small, asked, asked}, 1 << 20, by_size("ring", "ring")) ==
        std::vector<int>({1, 2}));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
