// Frames of the data lane go to the stripes in turn. A stripe without room is skipped, so that a
// slow one carries what it can, but not for more than kMostAhead frames: frames that come after a
// delayed one fill the receiver's memory. Each frame ends with its number, by which the other end
// restores the order. Control frames all go over the first stripe.
//
// A peer that leaves closes its sockets one by one, and the end of one may overtake frames on
// another, which may tell why the peer leaves. So the loss of a stripe is reported when all are
// lost, or when no data has come for kLastWordsUs.
#include "transport/striped_link.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "transport/link_support.h"

namespace tfdist {
namespace {

constexpr int64_t kLastWordsUs = 2000 * 1000;
constexpr uint64_t kMostAhead = 512;
constexpr int kStripeShift = 56;  // of a token: the stripe's index above, its own token below
constexpr size_t kNumberBytes = kStripeTrailerBytes;

class StripedLink : public Link {
 public:
  explicit StripedLink(std::vector<std::unique_ptr<Link>> stripes)
      : stripes_(std::move(stripes)),
        taken_(stripes_.size()),
        heads_(stripes_.size()),
        lost_(stripes_.size()) {}

  int peer() const override { return first().peer(); }
  const char* transport() const override { return first().transport(); }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    if (lane == Lane::kControl) return stripes_[0]->BeginSend(lane, bytes);
    open_ = {};
    ForStripes([&](size_t stripe) {
      open_ = stripes_[stripe]->BeginSend(lane, bytes + kNumberBytes);
      return open_.data() != nullptr;
    });
    return open_.data() == nullptr ? open_ : MutableByteSpan{open_.data(), bytes};
  }

  void CommitSend(Lane lane, const FrameHeader& header) override {
    if (lane == Lane::kControl) return stripes_[0]->CommitSend(lane, header);
    const size_t bytes = open_.size() - kNumberBytes;
    std::memcpy(open_.data() + bytes, &sent_, kNumberBytes);
    stripes_[sending_]->CommitSend(lane, header);
    NoteSent(bytes);
  }

  size_t MostPieces() const override {
    const size_t most = first().MostPieces();
    return most > 0 ? most - 1 : 0;
  }

  bool SendPieces(const FrameHeader& header, Pieces payload) override {
    size_t bytes = 0;
    pieces_.clear();
    for (const ByteSpan& piece : payload) {
      bytes += piece.size();
      pieces_.push_back(piece);
    }
    pieces_.push_back({reinterpret_cast<const uint8_t*>(&sent_), kNumberBytes});
    const Pieces numbered(pieces_.data(), pieces_.size());
    if (!ForStripes(
            [&](size_t stripe) { return stripes_[stripe]->SendPieces(header, numbered); })) {
      return false;
    }
    NoteSent(bytes);
    return true;
  }

  bool Poll(Lane lane, InFrame* frame) override {
    if (lane == Lane::kControl) return stripes_[0]->Poll(lane, frame);
    size_t waiting = 0;
    for (size_t i = 0; i < stripes_.size(); ++i) {
      Head& head = heads_[i];
      if (!head.there && !(head.there = stripes_[i]->Poll(lane, &head.frame))) continue;
      ++waiting;
      if (!ReadNumber(&head) || head.number != received_) continue;
      ++received_;
      head.there = false;
      *frame = head.frame;
      frame->header.payload_bytes -= kNumberBytes;
      frame->payload = {frame->payload.data(), frame->payload.size() - kNumberBytes};
      frame->token |= static_cast<uint64_t>(i) << kStripeShift;
      return true;
    }
    // The numbers of a stripe ascend, so the missing frame can no longer come.
    if (waiting == stripes_.size()) NoteGarbage();
    return false;
  }

  void Release(Lane lane, const InFrame& frame) override {
    if (lane == Lane::kControl) return stripes_[0]->Release(lane, frame);
    InFrame own = frame;
    own.token = frame.token & ((uint64_t{1} << kStripeShift) - 1);
    stripes_[frame.token >> kStripeShift]->Release(lane, own);
  }

  Status Pump(bool* moved) override {
    if (!garbage_.ok()) return garbage_;
    bool begins_again = received_ != received_before_;  // the wait for other stripes
    received_before_ = received_;
    for (size_t i = 0; i < stripes_.size(); ++i) {
      if (lost_[i]) continue;
      const Status status = stripes_[i]->Pump(moved);
      if (status.ok()) continue;
      if (status.code() != Code::kAborted) return status;  // not the peer's doing
      lost_[i] = true;
      if (error_.ok()) error_ = status;
      begins_again = true;
    }
    if (error_.ok()) return Status();
    const int64_t now_us = NowUs();
    if (begins_again) patient_since_us_ = now_us;
    const bool all = std::all_of(lost_.begin(), lost_.end(), [](bool lost) { return lost; });
    return all || now_us - patient_since_us_ > kLastWordsUs ? error_ : Status();
  }

  int fd() const override { return first().fd(); }
  bool WantsWrite() const override {
    return std::any_of(stripes_.begin(), stripes_.end(),
                       [](const auto& stripe) { return stripe->WantsWrite(); });
  }
  void Watch(std::vector<Watched>* watched) const override {
    for (size_t i = 0; i < stripes_.size(); ++i) {
      if (!lost_[i]) stripes_[i]->Watch(watched);
    }
  }
  void SetWakeMode(WakeMode mode) override {
    for (const auto& stripe : stripes_) stripe->SetWakeMode(mode);
  }
  bool Flushed() const override {
    return std::all_of(stripes_.begin(), stripes_.end(),
                       [](const auto& stripe) { return stripe->Flushed(); });
  }
  size_t MaxHeld() const override { return first().MaxHeld(); }

 private:
  // The next frame of a stripe, which may have to wait for those of others.
  struct Head {
    bool there = false;
    InFrame frame;
    uint64_t number = 0;
  };

  const Link& first() const { return *stripes_[0]; }

  // Calls `send` with each stripe, from the one whose turn it is, until one takes the frame; that
  // one is then sending_. If a stripe is kMostAhead frames behind, tries only that one. False: none
  // did.
  template <typename Send>
  bool ForStripes(const Send& send) {
    const auto behind = std::min_element(taken_.begin(), taken_.end());
    if (sent_ - *behind >= kMostAhead) {
      sending_ = static_cast<size_t>(behind - taken_.begin());
      return send(sending_);
    }
    for (size_t n = 0; n < stripes_.size(); ++n) {
      if (send(sending_)) return true;
      sending_ = Next(sending_);
    }
    return false;
  }

  size_t Next(size_t stripe) const { return stripe + 1 < stripes_.size() ? stripe + 1 : 0; }

  void NoteSent(size_t bytes) {
    data_bytes_sent_ += bytes;
    ++data_frames_sent_;
    taken_[sending_] = ++sent_;
    sending_ = Next(sending_);
  }

  // False: no frame of this link ends like that.
  bool ReadNumber(Head* head) {
    const ByteSpan payload = head->frame.payload;
    if (payload.size() >= kNumberBytes) {
      std::memcpy(&head->number, payload.data() + payload.size() - kNumberBytes, kNumberBytes);
      if (head->number >= received_) return true;
    }
    NoteGarbage();
    return false;
  }

  void NoteGarbage() {
    if (garbage_.ok()) garbage_ = PeerGarbage(peer(), "frames without numbers of their own");
  }

  const std::vector<std::unique_ptr<Link>> stripes_;
  size_t sending_ = 0;     // the stripe whose turn it is
  uint64_t sent_ = 0;      // number of the next frame of the data lane,
  uint64_t received_ = 0;  // and of the next one from the peer
  MutableByteSpan open_;
  std::vector<ByteSpan> pieces_;
  std::vector<uint64_t> taken_;  // by stripe: sent_ after it took its last frame
  std::vector<Head> heads_;
  std::vector<bool> lost_;
  Status garbage_;
  Status error_;                  // the first loss
  uint64_t received_before_ = 0;  // received_ at the last Pump
  int64_t patient_since_us_ = 0;
};

}  // namespace

std::unique_ptr<Link> MakeStripedLink(std::vector<std::unique_ptr<Link>> stripes) {
  return std::make_unique<StripedLink>(std::move(stripes));
}

}  // namespace tfdist
