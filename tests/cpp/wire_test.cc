// Control messages: what is written is read back, and nothing that is not a message is.
#include "scheduler/wire.h"

#include <random>

#include "check.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

RequestInfo SampleRequest() {
  RequestInfo info;
  info.key = "gradients 12/3";
  info.kind = CollectiveKind::kAllreduce;
  info.dtype = DType::kBfloat16;
  info.op = ReduceOp::kMax;
  info.root = 3;
  info.peer = 1;
  info.prescale = 0.1;
  info.postscale = -2.5;
  info.timeout_s = 12.5;
  info.bucket = true;
  info.shapes = {{}, {3, 4}, {0}};
  info.splits = {7, -1, 0};
  info.description = "a\nb";
  info.present = {0, 1, 1};
  info.predicted = PredictedTicket(3, 1, 9);
  info.algorithm = "ring";
  return info;
}

Response SampleResponse() {
  Response response;
  response.ticket = uint64_t{1} << 40;
  response.keys = {"x", "y"};
  response.error =
      Status(Code::kFailedPrecondition, "no \"agreement\"", "{\"kind\": \"mismatch\"}");
  response.rows = {5, 0, -1};
  response.present = {1};
  response.number = 65537;
  response.numbers = {0, kMaxRepeated};
  response.last = 3;
  return response;
}

TEST(requests_come_back_as_they_were) {
  const RequestInfo in = SampleRequest();
  RequestInfo out;
  CHECK(DecodeRequest(AsBytes(EncodeRequest(in)), &out));
  CHECK_EQ(out.key, in.key);
  CHECK(out.kind == in.kind && out.dtype == in.dtype && out.op == in.op && out.root == in.root);
  CHECK(out.prescale == in.prescale && out.postscale == in.postscale);
  CHECK(out.timeout_s == in.timeout_s && out.bucket && out.shapes == in.shapes);
  CHECK(out.peer == in.peer && out.splits == in.splits);
  CHECK(out.description == in.description && out.present == in.present);
  CHECK_EQ(out.predicted, in.predicted);
  CHECK_EQ(out.algorithm, in.algorithm);
}

TEST(only_an_allreduce_outside_of_any_group_repeats) {
  RequestInfo in = SampleRequest();
  in.repeats = true;
  RequestInfo out;
  CHECK(!DecodeRequest(AsBytes(EncodeRequest(in)), &out));
  in.bucket = false;
  CHECK(DecodeRequest(AsBytes(EncodeRequest(in)), &out) && out.repeats);
  in.kind = CollectiveKind::kReduce;
  CHECK(!DecodeRequest(AsBytes(EncodeRequest(in)), &out));
  in.repeats = false;
  CHECK(DecodeRequest(AsBytes(EncodeRequest(in)), &out) && !out.repeats);
}

TEST(responses_come_back_as_they_were) {
  const Response in = SampleResponse();
  Response out;
  CHECK(DecodeResponse(AsBytes(EncodeResponse(in)), &out));
  CHECK_EQ(out.ticket, in.ticket);
  CHECK(out.keys == in.keys && out.rows == in.rows && out.present == in.present);
  CHECK(out.error.code() == in.error.code());
  CHECK_EQ(out.number, in.number);
  CHECK(out.numbers == in.numbers);
  for (const std::vector<uint32_t>& wrong :
       std::vector<std::vector<uint32_t>>{{1, 2, 3}, {kMaxRepeated + 1}}) {
    Response other = SampleResponse();
    other.numbers = wrong;
    CHECK(!DecodeResponse(AsBytes(EncodeResponse(other)), &out));
  }
  CHECK_EQ(out.last, 3);
  CHECK_EQ(out.error.message(), in.error.message());
  CHECK_EQ(out.error.payload(), in.error.payload());
}

TEST(notes_come_back_as_they_were_and_nothing_else_does) {
  WaitNote wait{PredictedTicket(3, 2, 7), 600000, SampleRequest()};
  WaitNote wait_out;
  CHECK(DecodeWait(AsBytes(EncodeWait(wait)), &wait_out));
  CHECK(wait_out.ticket == wait.ticket && wait_out.waited_us == wait.waited_us);
  CHECK_EQ(wait_out.info.key, wait.info.key);
  const ClockNote clock{int64_t{1} << 40, -5, 7};
  ClockNote clock_out;
  CHECK(DecodeClock(AsBytes(EncodeClock(clock)), &clock_out));
  CHECK(clock_out.asked_us == clock.asked_us && clock_out.heard_us == -5);
  CHECK_EQ(clock_out.answered_us, 7);
  CHECK(!DecodeClock(AsBytes(EncodeClock(clock) + "x"), &clock_out));
  CHECK(!DecodeClock(AsBytes(std::string(23, 'x')), &clock_out));
  ProbeNote probe_out;
  CHECK(DecodeProbe(AsBytes(EncodeProbe({wait.ticket, 2})), &probe_out));
  CHECK(probe_out.ticket == wait.ticket && probe_out.answer == 2);
  CHECK(!DecodeProbe(AsBytes(EncodeProbe({wait.ticket, 3})), &probe_out));
  CHECK(!DecodeProbe(AsBytes(EncodeProbe({5, 0})), &probe_out));
  wait.ticket = 5;  // announced: the leader knows who is missing
  CHECK(!DecodeWait(AsBytes(EncodeWait(wait)), &wait_out));
  const LeaveNote leave = {{0, {wait_out.ticket}}, {65537, {}}};
  LeaveNote leave_out;
  const std::string bytes = EncodeLeave(leave);
  CHECK(DecodeLeave(AsBytes(bytes), &leave_out));
  CHECK(leave_out == leave);
  for (size_t n = 0; n < bytes.size(); ++n) {
    CHECK(!DecodeLeave(AsBytes(bytes.substr(0, n)), &leave_out));
  }
}

ConsensusMessage SampleConsensus(ConsensusMessage::Kind kind) {
  ConsensusMessage message;
  message.kind = kind;
  message.generation = 7;
  message.evidence = {{kNoRank, true, "late", "r"}, {3, false, "silent", ""}};
  message.commits = {{uint64_t{5} << 32, 12}};
  if (kind == ConsensusMessage::Kind::kPropose || kind == ConsensusMessage::Kind::kDecide) {
    Verdict verdict;
    verdict.generation = 7;
    verdict.next_generation = 8;
    verdict.culprit = message.evidence[1];
    verdict.others = {{2, true, "rank 2 has been stopped"}, {3, false, "no sign of life"}};
    verdict.failed = {kNoRank, 3};
    verdict.survivors = {0, 1, 2};
    verdict.commits = message.commits;
    message.verdict = std::make_shared<Verdict>(verdict);
  }
  return message;
}

TEST(words_about_membership_come_back_as_they_were_and_nothing_else_does) {
  using Kind = ConsensusMessage::Kind;
  for (Kind kind : {Kind::kReport, Kind::kPropose, Kind::kAccept, Kind::kDecide}) {
    const ConsensusMessage in = SampleConsensus(kind);
    const std::string bytes = EncodeConsensus(in);
    ConsensusMessage out;
    CHECK(DecodeConsensus(AsBytes(bytes), &out));
    CHECK(out.kind == kind && out.generation == 7 && out.commits == in.commits);
    CHECK_EQ(out.evidence.size(), size_t{2});
    CHECK_EQ(out.evidence[0].record, "r");
    CHECK(out.evidence[1].rank == 3 && !out.evidence[1].certain);
    CHECK_EQ(out.evidence[1].cause, "silent");
    CHECK_EQ(out.verdict != nullptr, in.verdict != nullptr);
    if (in.verdict != nullptr) CHECK(*out.verdict == *in.verdict);
    for (size_t n = 0; n < bytes.size(); ++n) {
      CHECK(!DecodeConsensus(AsBytes(bytes.substr(0, n)), &out));
    }
    CHECK(!DecodeConsensus(AsBytes(bytes + "x"), &out));
  }
  ConsensusMessage out;
  ConsensusMessage bad = SampleConsensus(Kind::kReport);
  bad.verdict = SampleConsensus(Kind::kDecide).verdict;  // a report carries none
  CHECK(!DecodeConsensus(AsBytes(EncodeConsensus(bad)), &out));
  bad = SampleConsensus(Kind::kDecide);
  bad.verdict = nullptr;
  CHECK(!DecodeConsensus(AsBytes(EncodeConsensus(bad)), &out));
  bad = SampleConsensus(Kind::kReport);
  std::swap(bad.evidence[0], bad.evidence[1]);  // by rank
  CHECK(!DecodeConsensus(AsBytes(EncodeConsensus(bad)), &out));
  bad = SampleConsensus(Kind::kReport);
  bad.evidence[0].cause.assign(kMaxCause + 1, 'x');
  CHECK(!DecodeConsensus(AsBytes(EncodeConsensus(bad)), &out));
  GateMessage gate;
  CHECK(DecodeGate(AsBytes(EncodeGate({GateMessage::Kind::kCommit, 9, 4})), &gate));
  CHECK(gate.kind == GateMessage::Kind::kCommit && gate.group == 9 && gate.step == 4);
  CHECK(!DecodeGate(AsBytes(EncodeGate({GateMessage::Kind::kCommit, 9, 0})), &gate));
  CHECK(!DecodeGate(AsBytes(EncodeGate({static_cast<GateMessage::Kind>(3), 9, 4})), &gate));
  Heartbeat beat;
  CHECK(DecodeBeat(AsBytes(EncodeBeat({3, 2})), &beat));
  CHECK(beat.sequence == 3 && beat.acknowledged == 2);
  CHECK(!DecodeBeat(AsBytes("1234567"), &beat));
}

TEST(an_error_too_long_to_travel_keeps_its_kind_and_its_beginning) {
  const ErrorRecord record{"mismatch", -1, "", 0, "x", "shapes", std::string(50000, 'd')};
  Status out;
  const std::string bytes =
      EncodeRecord(Status(Code::kFailedPrecondition, "the ranks do not agree", record));
  CHECK(bytes.size() <= kMaxRecord);
  CHECK(DecodeStatus(AsBytes(bytes), &out));
  CHECK_EQ(out.message(), "the ranks do not agree ...");
  CHECK_EQ(out.payload().rfind("{\"kind\": \"mismatch\"", 0), size_t{0});
}

TEST(a_failed_rank_with_an_error_too_long_to_travel_is_named_by_the_evidence) {
  const ErrorRecord record{"rank_failed", 1, "h", 7, "", std::string(50000, 'c'), ""};
  CHECK_EQ(EncodeRecord(Status(Code::kAborted, "rank 1 failed", record)), "");
}

TEST(a_text_is_shortened_between_two_characters) {
  const std::string text = "a\u00e9\u5b66";  // of 1, 2 and 3 bytes
  for (size_t bytes = 0; bytes <= text.size(); ++bytes) {
    const size_t whole = bytes < 1 ? 0 : bytes < 3 ? 1 : bytes < 6 ? 3 : 6;
    CHECK_EQ(Shortened(text, bytes), text.substr(0, whole));
  }
}

TEST(every_truncation_and_every_extra_byte_is_refused) {
  const std::string request = EncodeRequest(SampleRequest());
  const std::string response = EncodeResponse(SampleResponse());
  for (size_t n = 0; n < request.size(); ++n) {
    RequestInfo out;
    CHECK(!DecodeRequest(AsBytes(request.substr(0, n)), &out));
  }
  for (size_t n = 0; n < response.size(); ++n) {
    Response out;
    CHECK(!DecodeResponse(AsBytes(response.substr(0, n)), &out));
  }
  RequestInfo extra;
  CHECK(!DecodeRequest(AsBytes(request + "x"), &extra));
}

TEST(a_request_with_rows_and_not_one_tensor_is_refused) {
  RequestInfo in = SampleRequest();
  RequestInfo out;
  for (CollectiveKind kind :
       {CollectiveKind::kAllgather, CollectiveKind::kGather, CollectiveKind::kReduceScatter,
        CollectiveKind::kScatter, CollectiveKind::kAlltoall}) {
    in.kind = kind;
    CHECK(!DecodeRequest(AsBytes(EncodeRequest(in)), &out));
  }
  in.kind = CollectiveKind::kSendRecv;
  CHECK(DecodeRequest(AsBytes(EncodeRequest(in)), &out));
}

TEST(random_bytes_never_crash_the_parsers) {
  std::mt19937 random(17);
  const std::string valid[] = {EncodeRequest(SampleRequest()), EncodeResponse(SampleResponse()),
                               EncodeConsensus(SampleConsensus(ConsensusMessage::Kind::kDecide))};
  for (int i = 0; i < 200000; ++i) {
    std::string bytes = valid[i % 3];
    const int changes = 1 + static_cast<int>(random() % 6);
    for (int c = 0; c < changes; ++c) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    RequestInfo request;
    Response response;
    Status status;
    std::string key;
    std::string text;
    (void)DecodeRequest(AsBytes(bytes), &request);
    (void)DecodeResponse(AsBytes(bytes), &response);
    (void)DecodeStatus(AsBytes(bytes), &status);
    (void)DecodeStall(AsBytes(bytes), &key, &text);
    WaitNote wait;
    LeaveNote leave;
    (void)DecodeWait(AsBytes(bytes), &wait);
    (void)DecodeLeave(AsBytes(bytes), &leave);
    ConsensusMessage agreement;
    (void)DecodeConsensus(AsBytes(bytes), &agreement);
  }
}

TEST(a_status_with_a_code_that_is_never_used_is_refused) {
  for (int code : {2, 11, 14, 99, -1}) {
    Status status;
    CHECK(!DecodeStatus(AsBytes(EncodeStatus(Status(static_cast<Code>(code), "x"))), &status));
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
