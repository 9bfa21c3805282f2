// The Link that the engine sees for one peer of an Overlay.
#include <cstring>
#include <utility>

#include "transport/link_support.h"
#include "transport/overlay.h"

namespace tfdist {

class OverlayLink : public Link {
 public:
  OverlayLink(std::shared_ptr<Overlay> overlay, int peer)
      : overlay_(std::move(overlay)), peer_(peer) {}
  ~OverlayLink() override { overlay_->Close(peer_); }

  int peer() const override { return peer_; }
  const char* transport() const override {
    return connection() != nullptr ? connection()->transport() : "relayed";
  }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    open_bytes_[Index(lane)] = bytes;
    Overlay::Peer& state = overlay_->At(peer_);
    if (lane == Lane::kData && state.link == nullptr) {
      overlay_->Want(peer_);
      return {};
    }
    if (lane == Lane::kData || state.neighbour) return state.link->BeginSend(lane, bytes);
    if (state.unacknowledged.size() >= Overlay::kWindow || bytes > kMaxControlPayload) return {};
    return {open_, bytes};
  }

  void CommitSend(Lane lane, const FrameHeader& header) override {
    Overlay::Peer& state = overlay_->At(peer_);
    if (lane == Lane::kData || state.neighbour) {
      state.link->CommitSend(lane, header);
    } else {
      overlay_->Send(peer_, header,
                     std::string(reinterpret_cast<char*>(open_), open_bytes_[Index(lane)]));
    }
    if (lane != Lane::kData) return;
    data_bytes_sent_ += open_bytes_[Index(lane)];
    ++data_frames_sent_;
  }

  bool StreamsSend() const override { return state().link->StreamsSend(); }

  size_t MostPieces() const override {
    return connection() != nullptr ? connection()->MostPieces() : 0;
  }
  bool SendPieces(const FrameHeader& header, Pieces payload) override {
    if (!overlay_->At(peer_).link->SendPieces(header, payload)) return false;
    for (const ByteSpan& piece : payload) data_bytes_sent_ += piece.size();
    ++data_frames_sent_;
    return true;
  }

  bool HasFrame() const override {
    return !state().inbox.empty() || (connection() != nullptr && connection()->HasFrame());
  }

  bool Poll(Lane lane, InFrame* frame) override {
    if (lane == Lane::kControl) return overlay_->PollControl(peer_, frame);
    return connection() != nullptr && connection()->Poll(lane, frame);
  }
  void Release(Lane lane, const InFrame& frame) override {
    if (lane == Lane::kControl) {
      overlay_->ReleaseControl(peer_, frame);
    } else {
      connection()->Release(lane, frame);
    }
  }

  void NoteRead(const InFrame& frame, int64_t ns) override { connection()->NoteRead(frame, ns); }

  Status Pump(bool* moved) override { return overlay_->Pump(peer_, moved); }
  int fd() const override { return connection() != nullptr ? connection()->fd() : -1; }
  bool WantsWrite() const override { return connection() != nullptr && connection()->WantsWrite(); }
  void Watch(std::vector<Watched>* watched) const override {
    if (connection() != nullptr) connection()->Watch(watched);
  }
  void SetWakeMode(WakeMode mode) override {
    if (connection() != nullptr) connection()->SetWakeMode(mode);
  }
  bool Flushed() const override {
    return connection() == nullptr || (state().queue.empty() && connection()->Flushed());
  }
  size_t MaxHeld() const override { return connection() != nullptr ? connection()->MaxHeld() : 1; }
  bool Direct() const override { return connection() != nullptr; }
  void PeerLeaves() override {
    overlay_->Leaves(peer_);
    if (connection() != nullptr) connection()->PeerLeaves();
  }
  bool BarPeer() override { return connection() != nullptr && connection()->BarPeer(); }
  bool ClaimVerdict() override { return connection() == nullptr || connection()->ClaimVerdict(); }

 private:
  const Overlay::Peer& state() const { return overlay_->At(peer_); }
  Link* connection() const { return overlay_->At(peer_).link.get(); }

  const std::shared_ptr<Overlay> overlay_;
  const int peer_;
  size_t open_bytes_[kLanes] = {};
  uint8_t open_[kMaxControlPayload];  // of a control frame that is relayed
};

std::vector<std::unique_ptr<Link>> Overlay::MakeLinks(std::vector<std::unique_ptr<Link>> links) {
  std::vector<std::unique_ptr<Link>> made(links.size());
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    At(peer).link = std::move(links[static_cast<size_t>(peer)]);
    made[static_cast<size_t>(peer)] = std::make_unique<OverlayLink>(shared_from_this(), peer);
  }
  FindRoutes();
  return made;
}

}  // namespace tfdist
