// Control messages (scheduler/wire.h): whatever comes is refused or is a message, and what is a
// message is written and read back as the same.
#include "fuzz.h"
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

// What the leader computes with what came must be defined.
void CheckShapes(ByteSpan bytes) {
  RequestInfo info;
  if (!DecodeRequest(bytes, &info)) return;
  for (const std::vector<int64_t>& shape : info.shapes) FUZZ_CHECK(ElementCount(shape) >= 0);
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
  RequestInfo gather;
  gather.key = "x";
  gather.kind = CollectiveKind::kAllgather;
  gather.shapes = {{5, 2}};
  Response response;
  response.ticket = 77;
  response.keys = {"x", "gradients 12/3"};
  response.rows = {5, 0, -1};
  response.present = {1};
  Response refused = response;
  refused.error = Status(Code::kFailedPrecondition, "no agreement", "{\"kind\": \"mismatch\"}");
  const std::string zero(1, '\0');
  Verdict verdict;
  verdict.generation = 7;
  verdict.next_generation = 8;
  verdict.culprit = {3, false, "no sign of life for 2.0 s", EncodeStatus(refused.error)};
  verdict.failed = {3};
  verdict.survivors = {0, 1, 2};
  verdict.commits = {{5, 12}};
  AgreementMessage decided;
  decided.kind = AgreementMessage::Kind::kDecide;
  decided.generation = 7;
  decided.evidence = {verdict.culprit};
  decided.verdict = std::make_shared<Verdict>(verdict);
  return {zero + EncodeRequest(request),
          zero + EncodeRequest(gather),
          "\x01" + EncodeResponse(response),
          "\x01" + EncodeResponse(refused),
          "\x02" + EncodeStatus(refused.error),
          "\x02" + EncodeStatus(Status()),
          "\x03" + EncodeStall("x", "rank 3 is missing"),
          "\x04" + EncodeWait({7, 1000, request}),
          "\x05" + EncodeProbe({7, 2}),
          "\x06" + EncodeLeave({{0, {1, 2}}, {9, {}}}),
          "\x07" + EncodeBeat({7, 6}),
          "\x08" + EncodeAgreement(decided),
          "\x09" + EncodeGate({GateMessage::Kind::kCommit, uint64_t{3} << 32, 12})};
}

}  // namespace fuzz
}  // namespace tfdist

// The first byte picks the message.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tfdist;
  if (size == 0) return 0;
  const ByteSpan bytes(data + 1, size - 1);
  switch (data[0] % 10) {
    case 0:
      CheckRoundTrip<RequestInfo>(bytes, DecodeRequest, EncodeRequest);
      CheckShapes(bytes);
      break;
    case 1:
      CheckRoundTrip<Response>(bytes, DecodeResponse, EncodeResponse);
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
      CheckRoundTrip<AgreementMessage>(bytes, DecodeAgreement, EncodeAgreement);
      break;
    default:
      CheckRoundTrip<GateMessage>(bytes, DecodeGate, EncodeGate);
  }
  return 0;
}
