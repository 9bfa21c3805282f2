// Control messages (scheduler/wire.h): whatever comes is refused or is a message, and what is a
// message is written and read back as the same.
#include "fuzz.h"
#include "scheduler/join.h"
#include "scheduler/request_check.h"
#include "scheduler/ticket_order.h"
#include "scheduler/wire.h"

namespace tfdist {
namespace {

template <typename T>
void CheckRoundTrip(ByteSpan bytes, bool (*decode)(ByteSpan, T*), std::string (*encode)(const T&)) {
  T first;
  if (!decode(bytes, &first)) return;
  const std::string once = encode(first);
  T second;
  FUZZ_CHECK(decode(AsBytes(once), &second));
  FUZZ_CHECK(encode(second) == once);
}

constexpr int64_t kMostElements = 1 << 16;

// As a rank that has joined: what is asked of it has memory of its size, or none.
void CheckJoined(const RequestInfo& info) {
  const RequestInfo own = JoinedInfo(info, 4);
  int64_t elements = 0;
  for (int64_t size : own.sizes) elements += size;
  for (const auto& shape : own.shapes) {
    const int64_t count = ElementCount(shape);
    FUZZ_CHECK(count >= 0);
    if (count > kMostElements) return;
  }
  if (elements > kMostElements) return;
  const std::unique_ptr<Request> request = MakeJoinedRequest(own);
  FUZZ_CHECK(request != nullptr);
  uint8_t sum = 0;
  for (const TensorView& tensor : request->tensors) {
    const size_t bytes = static_cast<size_t>(tensor.elements) * DTypeSize(own.dtype);
    for (size_t i = 0; i < bytes; ++i) sum = static_cast<uint8_t>(sum + tensor.input[i]);
  }
  request->info.key.push_back(static_cast<char>(sum));
  FUZZ_CHECK(CheckRequest(*request, 4).ok() || !request->info.key.empty());
}

// Values that the leader computes from a request that it receives must be defined.
void CheckShapes(ByteSpan bytes) {
  RequestInfo info;
  if (!DecodeRequest(bytes, &info)) return;
  for (const std::vector<int64_t>& shape : info.shapes) FUZZ_CHECK(ElementCount(shape) >= 0);
  FUZZ_CHECK(info.timeout_s >= 0 && info.timeout_s <= 1e9);
  CheckJoined(info);
}

// Of ranks that have joined: for each key what they take part in.
void CheckInfos(ByteSpan bytes) {
  Response response;
  if (!DecodeResponse(bytes, &response)) return;
  FUZZ_CHECK(response.infos.size() == (response.joined.empty() ? 0 : response.keys.size()));
}

// A leader of four ranks handles the note of a rank that has joined.
void CheckJoins(ByteSpan bytes) {
  JoinNote note;
  if (!DecodeJoin(bytes, &note)) return;
  FUZZ_CHECK(note.timeout_s >= 0 && note.timeout_s <= 1e9);
  Joins joins(0, {0, 1, 2, 3});
  note.rank &= 3;
  FUZZ_CHECK(joins.Add(note, 0).ok());
  FUZZ_CHECK(!joins.Add(note, 0).ok());
  for (uint64_t ticket : note.last) {
    if (!IsPredicted(ticket)) continue;
    joins.Started({ticket, 0, {}}, 1);  // it took part
    joins.Started({ticket + 1, 0, {}}, 2);
  }
  FUZZ_CHECK(joins.TakeOrders().empty());
  for (int by = 0; by < 4; ++by) {
    if (by != note.rank) joins.Acknowledge(note.rank, by, joins.round());
  }
  FUZZ_CHECK(joins.TakeOrders().size() <= note.last.size());
  FUZZ_CHECK(joins.TakeAcknowledged().size() == 1 && !joins.complete());
}

void CheckStall(ByteSpan bytes) {
  std::string key;
  std::string text;
  if (!DecodeStall(bytes, &key, &text)) return;
  const std::string once = EncodeStall(key, text);
  FUZZ_CHECK(once.size() == bytes.size());
}

}  // namespace

namespace fuzz {

std::vector<std::string> Seeds() {
  RequestInfo request;
  request.key = "gradients 12/3";
  request.kind = CollectiveKind::kAllreduce;
  request.shapes = {{}, {3, 4}, {0}};
  request.description = "a\nb";
  request.present = {0, 1, 1};
  request.repeats = true;
  RequestInfo gather;
  gather.key = "x";
  gather.kind = CollectiveKind::kAllgather;
  gather.shapes = {{5, 2}};
  Response response;
  response.ticket = 77;
  response.keys = {"x", "gradients 12/3"};
  response.rows = {5, 0, -1};
  response.present = {1};
  response.numbers = {0, 3};
  // A bucket, and as a rank that has joined takes part in it and in a gather.
  RequestInfo bucket;
  bucket.key = "g.0";
  bucket.kind = CollectiveKind::kAllreduce;
  bucket.op = ReduceOp::kAverage;
  bucket.timeout_s = 600;
  bucket.bucket = true;
  bucket.shapes = {{12}};
  bucket.predicted = PredictedTicket(3, 1, 7);
  bucket.sizes = {4, 8};
  bucket.hints = {1, uint64_t{1} << 40};
  bucket.group = "gradients";
  bucket.bucket_index = 1;
  bucket.bucket_count = 2;
  bucket.algorithm = "ring";
  Response taken_part;
  taken_part.ticket = 78;
  taken_part.keys = {"g.0", "x"};
  taken_part.joined = {1, 3};
  taken_part.infos = {bucket, JoinedInfo(gather, 4)};
  const JoinNote joined{2, 600, {bucket.predicted, PredictedTicket(1, 0, 1)}, 0, 7};
  Response refused = response;
  refused.error = Status(Code::kFailedPrecondition, "no agreement", "{\"kind\": \"mismatch\"}");
  const std::string zero(1, '\0');
  Verdict verdict;
  verdict.generation = 7;
  verdict.next_generation = 8;
  verdict.culprit = {3, false, "no sign of life for 2.0 s", EncodeStatus(refused.error)};
  verdict.others = {{4, true, "its process has been stopped for 1.0 s"}};
  verdict.failed = {3};
  verdict.survivors = {0, 1, 2};
  verdict.commits = {{5, 12}};
  ConsensusMessage decided;
  decided.kind = ConsensusMessage::Kind::kDecide;
  decided.generation = 7;
  decided.evidence = {verdict.culprit};
  decided.verdict = std::make_shared<Verdict>(verdict);
  BlockedNote blocked;
  blocked.place = "tfdist.evaluate (a.py:1)";
  blocked.waits = {{0, {0, 1}, 0, "x"}, {0, {0, 1}, bucket.predicted, "g.0"}};
  blocked.took_part = {{0, {bucket.predicted}}};
  blocked.led = {{0, "x", {1}}};
  return {zero + EncodeRequest(request),
          zero + EncodeRequest(gather),
          zero + EncodeRequest(bucket),
          "\x01" + EncodeResponse(response),
          "\x01" + EncodeResponse(refused),
          "\x01" + EncodeResponse(taken_part),
          "\x02" + EncodeStatus(refused.error),
          "\x02" + EncodeStatus(Status()),
          "\x03" + EncodeStall("x", "rank 3 is missing"),
          "\x04" + EncodeWait({bucket.predicted, 1000, bucket}),
          "\x05" + EncodeProbe({bucket.predicted, 2}),
          "\x06" + EncodeLeave({{0, {1, 2}}, {9, {}}}),
          "\x07" + EncodeBeat({7, 6}),
          "\x08" + EncodeConsensus(decided),
          "\x09" + EncodeGate({GateMessage::Kind::kCommit, uint64_t{3} << 32, 12}),
          "\x0b" + EncodeJoin(joined),
          "\x0b" + EncodeJoin({1, 0, {}, 2, 0}),
          "\x0c" + EncodeBlocked(blocked),
          "\x0a" + EncodeClock({1000, 2000, 2001})};
}

}  // namespace fuzz
}  // namespace tfdist

// The first byte picks the message.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tfdist;
  if (size == 0) return 0;
  const ByteSpan bytes(data + 1, size - 1);
  switch (data[0] % 13) {
    case 0:
      CheckRoundTrip<RequestInfo>(bytes, DecodeRequest, EncodeRequest);
      CheckShapes(bytes);
      break;
    case 1:
      CheckRoundTrip<Response>(bytes, DecodeResponse, EncodeResponse);
      CheckInfos(bytes);
      break;
    case 2:
      CheckRoundTrip<Status>(bytes, DecodeStatus, EncodeStatus);
      break;
    case 3:
      CheckStall(bytes);
      break;
    case 4:
      CheckRoundTrip<WaitNote>(bytes, DecodeWait, EncodeWait);
      break;
    case 5:
      CheckRoundTrip<ProbeNote>(bytes, DecodeProbe, EncodeProbe);
      break;
    case 6:
      CheckRoundTrip<LeaveNote>(bytes, DecodeLeave, EncodeLeave);
      break;
    case 7:
      CheckRoundTrip<Heartbeat>(bytes, DecodeBeat, EncodeBeat);
      break;
    case 8:
      CheckRoundTrip<ConsensusMessage>(bytes, DecodeConsensus, EncodeConsensus);
      break;
    case 9:
      CheckRoundTrip<GateMessage>(bytes, DecodeGate, EncodeGate);
      break;
    case 12:
      CheckRoundTrip<BlockedNote>(bytes, DecodeBlocked, EncodeBlocked);
      break;
    case 10:
      CheckRoundTrip<ClockNote>(bytes, DecodeClock, EncodeClock);
      break;
    default:
      CheckRoundTrip<JoinNote>(bytes, DecodeJoin, EncodeJoin);
      CheckJoins(bytes);
  }
  return 0;
}
