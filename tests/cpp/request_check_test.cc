// Requests that a rank refuses without asking the others.
#include "scheduler/request_check.h"

#include <cmath>
#include <functional>
#include <memory>

#include "check.h"
#include "scheduler/row_counts.h"

namespace tfdist {
namespace {

const CollectiveKind kAll[] = {
    CollectiveKind::kAllreduce, CollectiveKind::kAllgather, CollectiveKind::kBroadcast,
    CollectiveKind::kBarrier,   CollectiveKind::kRegister,  CollectiveKind::kReduceScatter,
    CollectiveKind::kReduce,    CollectiveKind::kGather,    CollectiveKind::kScatter,
    CollectiveKind::kAlltoall,  CollectiveKind::kSendRecv,
};

Request Valid(CollectiveKind kind) {
  Request request;
  request.info.key = "x";
  request.info.kind = kind;
  request.info.timeout_s = 1;
  if (kind == CollectiveKind::kBarrier || kind == CollectiveKind::kRegister) return request;
  request.info.dtype = DType::kFloat32;
  request.info.shapes = {{4}};
  request.tensors.resize(1);
  if (HasRows(kind))
    request.allocate = [](const std::vector<int64_t>&, int64_t) -> void* { return nullptr; };
  if (kind == CollectiveKind::kSendRecv) request.info.peer = 1;
  return request;
}

TEST(a_valid_request_of_every_kind_passes) {
  for (CollectiveKind kind : kAll) CHECK_OK(CheckRequest(Valid(kind), 2));
}

TEST(arguments_in_which_ranks_may_differ_are_not_judged_here) {
  Request request = Valid(CollectiveKind::kScatter);
  request.info.root = 99;
  request.info.splits = {-1, 7};
  CHECK_OK(CheckRequest(request, 2));
}

TEST(adasum_needs_a_power_of_two) {
  RequestInfo info;
  info.key = "x";
  for (int size : {1, 2, 3, 4, 6, 8}) {
    info.op = ReduceOp::kSum;
    CHECK_OK(CheckSetSize(info, size));
    info.op = ReduceOp::kAdasum;
    const Status status = CheckSetSize(info, size);
    CHECK_EQ(status.ok(), size != 3 && size != 6);
    if (status.ok()) continue;
    CHECK(status.message().find("ranks, got " + std::to_string(size)) != std::string::npos);
  }
}

TEST(every_mistake_is_an_invalid_argument_that_says_what_was_expected) {
  struct Case {
    CollectiveKind kind;
    std::function<void(Request*)> change;
    const char* text;
  };
  const auto allreduce = CollectiveKind::kAllreduce;
  const std::vector<Case> cases = {
      {allreduce, [](Request* r) { r->info.key = ""; }, "needs a name"},
      {CollectiveKind::kBarrier, [](Request* r) { r->info.timeout_s = 0; }, "timeout"},
      {CollectiveKind::kBarrier, [](Request* r) { r->info.timeout_s = NAN; }, "timeout"},
      {CollectiveKind::kGather, [](Request* r) { r->info.timeout_s = 1e10; }, "timeout"},
      {allreduce, [](Request* r) { r->info.dtype = DType::kInvalid; }, "not supported"},
      {CollectiveKind::kAlltoall, [](Request* r) { r->info.dtype = static_cast<DType>(7); },
       "dtype number 7"},
      {allreduce, [](Request* r) { r->info.prescale = INFINITY; }, "finite"},
      {CollectiveKind::kReduce, [](Request* r) { r->info.postscale = NAN; }, "finite"},
      {CollectiveKind::kReduceScatter,
       [](Request* r) {
         r->info.dtype = DType::kInt32;
         r->info.prescale = 2;
       },
       "floating or complex dtype, got int32"},
      {CollectiveKind::kReduce, [](Request* r) { r->info.op = ReduceOp::kAdasum; },
       "supported only by allreduce, not by reduce"},
      {CollectiveKind::kReduceScatter, [](Request* r) { r->info.op = ReduceOp::kAdasum; },
       "supported only by allreduce, not by reduce_scatter"},
      {allreduce,
       [](Request* r) {
         r->info.op = ReduceOp::kAdasum;
         r->info.algorithm = "ring";
       },
       "adasum has one algorithm"},
      {allreduce, [](Request* r) { r->info.splits = {4}; }, "allreduce takes no splits"},
      {CollectiveKind::kGather, [](Request* r) { r->info.splits = {4}; }, "gather takes no splits"},
      {CollectiveKind::kGather, [](Request* r) { r->tensors.clear(); }, "one tensor"},
      {CollectiveKind::kAllgather, [](Request* r) { r->tensors.resize(2); }, "one tensor"},
      {CollectiveKind::kSendRecv, [](Request* r) { r->tensors.resize(2); }, "one tensor"},
      {CollectiveKind::kScatter, [](Request* r) { r->allocate = nullptr; }, "a callback"},
      {CollectiveKind::kSendRecv, [](Request* r) { r->info.peer = 0; }, "got 0 and 0"},
      {CollectiveKind::kSendRecv, [](Request* r) { r->info.peer = -1; }, "got 0 and -1"},
      {CollectiveKind::kSendRecv, [](Request* r) { r->info.root = -2; }, "got -2 and 1"},
      {CollectiveKind::kSendRecv, [](Request* r) { r->info.peer = 2; }, "in [0, 2), got 0 and 2"},
      {CollectiveKind::kReduce,
       [](Request* r) {
         r->group = "g";
         r->bucket_count = 1;
       },
       "a bucket of a group is an allreduce"},
      {CollectiveKind::kBroadcast, [](Request* r) { r->info.repeats = true; }, "can repeat"},
      {allreduce,
       [](Request* r) {
         r->group = "g";
         r->bucket_count = 1;
         r->info.repeats = true;
       },
       "no bucket of a group can repeat"},
      {allreduce,
       [](Request* r) {
         r->group = "g";
         r->bucket_index = 2;
         r->bucket_count = 2;
       },
       "0 <= bucket < bucket_count"},
  };
  for (const Case& c : cases) {
    Request request = Valid(c.kind);
    c.change(&request);
    const Status status = CheckRequest(request, 2);
    CHECK_EQ_IN(status.code() == Code::kInvalidArgument, true, c.text);
    CHECK_EQ_IN(status.message().find(c.text) != std::string::npos, true, status.message());
    CHECK_EQ_IN(status.payload().find("invalid_argument") != std::string::npos, true, c.text);
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
