// The overlays of all ranks of a world in one thread, over inproc or shm links, on a clock that the
// test turns.
#ifndef TFDIST_TESTS_CPP_OVERLAY_WORLD_H_
#define TFDIST_TESTS_CPP_OVERLAY_WORLD_H_

#include <sys/eventfd.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "check.h"
#include "transport/link_support.h"
#include "transport/overlay.h"
#include "transport/routes.h"
#include "transport/transport.h"

namespace tfdist {

class OverlayWorld {
 public:
  using Ends = std::pair<int, int>;

  explicit OverlayWorld(int size, const std::string& transport = "inproc")
      : size_(size), entry_(FindTransport(transport)) {
    CHECK(entry_ != nullptr);
    config_.segment_bytes = 4096;
    config_.shm_slots = 2;
    std::vector<std::vector<std::unique_ptr<Link>>> links(static_cast<size_t>(size));
    for (auto& row : links) row.resize(static_cast<size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
      bells_.emplace_back(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    }
    for (int a = 0; a < size; ++a) {
      for (int b : OverlayNeighbours(a, size)) {
        if (b < a) continue;
        auto [one, two] = Connect(a, b);
        links[static_cast<size_t>(a)][static_cast<size_t>(b)] = std::move(one);
        links[static_cast<size_t>(b)][static_cast<size_t>(a)] = std::move(two);
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      Overlay::Hooks hooks{[this, rank](int peer) { wanted.emplace_back(rank, peer); },
                           [this] { return now_us; }};
      overlays.push_back(std::make_shared<Overlay>(rank, size, 7, hooks));
      ranks.push_back(overlays.back()->MakeLinks(std::move(links[static_cast<size_t>(rank)])));
    }
  }

  std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> Connect(int a, int b) {
    LinkEnds end_a;
    LinkEnds end_b;
    CHECK_OK(entry_->make_pair(a, b, bells_[static_cast<size_t>(a)].get(),
                               bells_[static_cast<size_t>(b)].get(), config_, &end_a, &end_b));
    auto one = entry_->make(end_a, config_);
    auto two = entry_->make(end_b, config_);
    CHECK_OK(one.status());
    CHECK_OK(two.status());
    return {std::move(one.value()), std::move(two.value())};
  }

  Link* At(int rank, int peer) {
    return ranks[static_cast<size_t>(rank)][static_cast<size_t>(peer)].get();
  }
  bool alive(int rank) const { return !ranks[static_cast<size_t>(rank)].empty(); }
  // Without a goodbye.
  void Kill(int rank) { ranks[static_cast<size_t>(rank)].clear(); }

  // A message of one frame. False: full.
  bool Say(int from, int to, const std::string& text) {
    const MutableByteSpan room = At(from, to)->BeginSend(Lane::kControl, text.size());
    if (room.data() == nullptr) return false;
    std::memcpy(room.data(), text.data(), text.size());
    FrameHeader header;
    header.type = 3;
    header.generation = 7;
    header.segment = 1;
    At(from, to)->CommitSend(Lane::kControl, header);
    return true;
  }

  // One turn of one rank, as the engine does it: what came goes to `heard`, what is lost to `lost`.
  bool Turn(int rank) {
    bool moved = false;
    for (int peer = 0; peer < size_ && alive(rank); ++peer) {
      Link* link = At(rank, peer);
      if (link == nullptr) continue;
      const Status status = link->Pump(&moved);
      bool read = false;
      InFrame frame;
      while (link->Poll(Lane::kControl, &frame)) {
        read = true;
        CHECK_EQ(frame.header.type, 3);
        CHECK_EQ(frame.header.segment, 1u);
        heard[{peer, rank}].emplace_back(reinterpret_cast<const char*>(frame.payload.data()),
                                         frame.payload.size());
        link->Release(Lane::kControl, frame);
      }
      moved |= read;
      if (status.ok() || read) continue;
      lost[{rank, peer}] = status.message();
      first_loss.emplace(rank, peer);
      ranks[static_cast<size_t>(rank)][static_cast<size_t>(peer)].reset();
      moved = true;
    }
    return moved;
  }
  // Turns all ranks until nothing moves.
  void Settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < size_; ++rank) moved |= Turn(rank);
    }
  }

  int64_t now_us = 1000000;
  std::vector<std::shared_ptr<Overlay>> overlays;
  std::vector<std::vector<std::unique_ptr<Link>>> ranks;  // by rank and peer; empty: dead
  std::vector<Ends> wanted;                               // who wants a link to whom
  std::map<Ends, std::vector<std::string>> heard;         // by source and destination
  std::map<Ends, std::string> lost;                       // by observer and who is lost
  std::map<int, int> first_loss;                          // by observer

 private:
  const int size_;
  const TransportEntry* entry_;
  Config config_;
  std::vector<UniqueFd> bells_;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_OVERLAY_WORLD_H_
