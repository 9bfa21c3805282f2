// The bytes of control messages. Little-endian, lengths before contents, every read checked: a
// message that does not parse is an error, never a crash or a large allocation.
#ifndef TFDIST_OPS_SCHEDULER_WIRE_H_
#define TFDIST_OPS_SCHEDULER_WIRE_H_

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "base/span.h"
#include "base/status.h"
#include "membership/failure_consensus.h"
#include "scheduler/request_info.h"

namespace tfdist {

// FrameHeader::type of the control lane.
enum class FrameType : uint8_t {
  kReady = 1,        // rank -> leader: RequestInfo
  kResponse = 2,     // leader -> rank: Response
  kLeave = 4,        // any -> any: this rank shuts down; what it took part in (LeaveNote)
  kLeaveAck = 5,     // answer to kLeave: nothing from that rank is unread
  kStall = 6,        // leader -> rank: key, text
  kWaiting = 7,      // rank -> leader: a predicted operation stands still (WaitNote)
  kProbe = 8,        // leader -> rank: asks how far the rank is with a ticket (ProbeNote)
  kProbeAnswer = 9,  // rank -> leader: ProbeNote; also unasked, when the answer has changed
  kBeat = 10,        // any -> any: Heartbeat
  kConsensus = 11,   // any -> any: ConsensusMessage
  kGate = 12,        // member <-> leader of a process set: GateMessage
  kJoin = 13,        // rank -> leader: it has joined; leader -> member: rank `rank` has (JoinNote)
  kJoinAck = 14,     // member -> leader: it knows that rank `rank` has joined (JoinNote)
  kStarted = 15,     // member -> leader: a predicted operation needs a joined rank (WaitNote)
  kTakePart = 16,    // leader -> joined rank: take part in this predicted operation (WaitNote)
  kJoinEnd = 17,     // leader -> member: all have joined; `rank` called everything (JoinNote)
  kClock = 18,       // rank -> rank 0 and back, while timelines are written: ClockNote
  kTimeline = 19,    // rank -> rank 0: lines of its timeline
  kBlocked = 20,     // rank -> rank 0: its program waits in collectives (BlockedNote)
  kBlockedAsk = 21,  // rank 0 -> rank: asks whether its program still waits
};

// The process set of these notes is in the header of the frame.
struct WaitNote {
  uint64_t ticket = 0;
  int64_t waited_us = 0;
  RequestInfo info;
};
struct ProbeNote {
  uint64_t ticket = 0;
  uint8_t answer = 0;  // StallTracker::Answer; in a question 0
};
// See join.h. What is not needed stays empty.
struct JoinNote {
  int32_t rank = 0;
  double timeout_s = 0;
  std::vector<uint64_t> last;  // the rank's last predicted ticket of every bucket
  int32_t complete = 0;        // kJoinEnd: how many ranks called every collective
  uint32_t round = 0;          // kJoin of the leader, kJoinAck: how often all have joined before
};
// Times of a round trip, each by the clock of the rank that took it. The last two are 0 in the
// question.
struct ClockNote {
  int64_t asked_us = 0;
  int64_t heard_us = 0;
  int64_t answered_us = 0;
};
// By set: the last predicted ticket of every bucket.
using LeaveNote = std::map<uint32_t, std::vector<uint64_t>>;
// See deadlock.h. An operation that a rank waits for: a predicted one by its ticket, one that waits
// for agreement by its key.
struct BlockedWait {
  uint32_t set = 0;
  std::vector<int32_t> ranks;  // of the set
  uint64_t ticket = 0;
  std::string key;
};
// An operation that waits for agreement, by the leader of its set.
struct LedWait {
  uint32_t set = 0;
  std::string key;
  std::vector<int32_t> missing;  // ranks that have not submitted it
};
struct BlockedNote {
  // Where the threads of the program that call collectives stand.
  enum class How : uint8_t {
    kEager = 0,   // inside of calls that last until their operation ends
    kGraph = 1,   // inside of tf.functions, which may still submit something
    kPatient = 2  // inside of either, for so long that no thread is expected to submit more
  };
  uint32_t round = 0;  // of the question that it answers; 0: of none
  uint64_t moves = 0;  // how often something has moved on this rank
  How how = How::kEager;
  std::string place;               // the user's call that waits, with its file and line
  std::vector<BlockedWait> waits;  // all that it waits for; none: it may go on by itself
  LeaveNote took_part;
  std::vector<LedWait> led;
};

class WireWriter {
 public:
  template <typename T>
  void Number(T value) {
    static_assert(std::is_arithmetic_v<T>, "numbers only");
    const auto* bytes = reinterpret_cast<const char*>(&value);
    buffer_.append(bytes, sizeof(T));
  }
  void Text(const std::string& text) {
    Number(static_cast<uint32_t>(text.size()));
    buffer_ += text;
  }
  template <typename T>
  void Numbers(const std::vector<T>& values) {
    Number(static_cast<uint32_t>(values.size()));
    for (T value : values) Number(value);
  }
  std::string Take() { return std::move(buffer_); }

 private:
  std::string buffer_;
};

class WireReader {
 public:
  explicit WireReader(ByteSpan bytes) : bytes_(bytes) {}

  template <typename T>
  T Number() {
    static_assert(std::is_arithmetic_v<T>, "numbers only");
    T value{};
    if (!Has(sizeof(T))) return value;
    __builtin_memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  std::string Text() {
    const auto size = Number<uint32_t>();
    if (!Has(size)) return "";
    std::string text(reinterpret_cast<const char*>(bytes_.data()) + position_, size);
    position_ += size;
    return text;
  }
  template <typename T>
  std::vector<T> Numbers() {
    const auto count = Number<uint32_t>();
    std::vector<T> values;
    if (!Has(size_t{count} * sizeof(T))) return values;
    values.reserve(count);
    for (uint32_t i = 0; i < count; ++i) values.push_back(Number<T>());
    return values;
  }
  // True when every read so far was inside the message.
  bool ok() const { return ok_; }
  // True when the message parsed and nothing is left over.
  bool Done() const { return ok_ && position_ == bytes_.size(); }
  size_t Left() const { return bytes_.size() - position_; }

 private:
  bool Has(size_t count) {
    if (!ok_ || count > Left()) ok_ = false;
    return ok_;
  }
  ByteSpan bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

std::string EncodeRequest(const RequestInfo& info);
bool DecodeRequest(ByteSpan bytes, RequestInfo* info);
std::string EncodeResponse(const Response& response);
bool DecodeResponse(ByteSpan bytes, Response* response);
std::string EncodeStatus(const Status& status);
bool DecodeStatus(ByteSpan bytes, Status* status);
std::string EncodeStall(const std::string& key, const std::string& text);
bool DecodeStall(ByteSpan bytes, std::string* key, std::string* text);
std::string EncodeWait(const WaitNote& note);
bool DecodeWait(ByteSpan bytes, WaitNote* note);
std::string EncodeProbe(const ProbeNote& note);
bool DecodeProbe(ByteSpan bytes, ProbeNote* note);
std::string EncodeJoin(const JoinNote& note);
bool DecodeJoin(ByteSpan bytes, JoinNote* note);
std::string EncodeLeave(const LeaveNote& note);
bool DecodeLeave(ByteSpan bytes, LeaveNote* note);
std::string EncodeClock(const ClockNote& note);
bool DecodeClock(ByteSpan bytes, ClockNote* note);
std::string EncodeBlocked(const BlockedNote& note);
bool DecodeBlocked(ByteSpan bytes, BlockedNote* note);
std::string EncodeRound(uint32_t round);
bool DecodeRound(ByteSpan bytes, uint32_t* round);
// Encodes an error for evidence. One longer than kMaxRecord keeps its kind and the start of its
// message; that of a failed rank is "", as the evidence itself names the rank.
std::string EncodeRecord(const Status& status);
std::string EncodeBeat(const Heartbeat& beat);
bool DecodeBeat(ByteSpan bytes, Heartbeat* beat);
std::string EncodeConsensus(const ConsensusMessage& message);
bool DecodeConsensus(ByteSpan bytes, ConsensusMessage* message);
std::string EncodeGate(const GateMessage& message);
bool DecodeGate(ByteSpan bytes, GateMessage* message);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_WIRE_H_
