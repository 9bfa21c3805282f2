// Link::SendPieces: frames that go from the caller's memory, without a buffer of the link's own.
#include <sys/socket.h>

#include <algorithm>
#include <random>
#include <vector>

#include "link_pair.h"

namespace tfdist {
namespace {

// Transports that have it.
void ForEachOfThem(const std::function<void(Pair*)>& body, const Config& config = SmallConfig()) {
  int found = 0;
  ForEachTransport([&](const TransportEntry& entry) {
    Pair pair(entry, config);
    if (pair.a->MostPieces() == 0) return;
    ++found;
    body(&pair);
  });
  CHECK(found > 0);
}

// As TrySend on the data lane, from `count` pieces of random lengths, which are overwritten as soon
// as SendPieces has returned.
bool TrySendPieces(Link* link, size_t bytes, size_t count, uint64_t ticket, std::mt19937* random) {
  std::vector<uint8_t> payload(bytes);
  for (size_t i = 0; i < bytes; ++i) payload[i] = Pattern(ticket, i);
  std::vector<size_t> cuts = {0, bytes};
  while (cuts.size() < count + 1) cuts.push_back((*random)() % (bytes + 1));
  std::sort(cuts.begin(), cuts.end());
  std::vector<ByteSpan> pieces;
  for (size_t c = 0; c + 1 < cuts.size(); ++c) {
    pieces.push_back({payload.data() + cuts[c], cuts[c + 1] - cuts[c]});
  }
  const bool sent = link->SendPieces(HeaderOf(ticket), {pieces.data(), pieces.size()});
  std::fill(payload.begin(), payload.end(), 0xee);
  return sent;
}

// Sizes 0 to a whole segment, by turns with packed frames and with the control lane.
void ExpectAllArrive(Pair* pair, uint64_t frames) {
  std::mt19937 random(11);
  uint64_t sent[2] = {0, 0};
  uint64_t got[2] = {0, 0};
  const auto size = [](uint64_t ticket) { return ticket % 9 == 0 ? 4096 : ticket * 37 % 4097; };
  PumpUntil(pair, [&] {
    const uint64_t ticket = sent[1];
    const size_t count = 1 + ticket % pair->a->MostPieces();
    if (ticket < frames &&
        (ticket % 4 == 3 ? TrySend(pair->a.get(), Lane::kData, size(ticket), ticket)
                         : TrySendPieces(pair->a.get(), size(ticket), count, ticket, &random))) {
      ++sent[1];
    }
    if (sent[0] < frames / 4 && TrySend(pair->a.get(), Lane::kControl, sent[0] % 300, sent[0])) {
      ++sent[0];
    }
    for (Lane lane : {Lane::kControl, Lane::kData}) {
      InFrame frame;
      const int i = Index(lane);
      if (!pair->b->Poll(lane, &frame)) continue;
      CheckFrame(frame, lane, lane == Lane::kData ? size(got[i]) : got[i] % 300, got[i]);
      pair->b->Release(lane, frame);
      ++got[i];
    }
    return got[0] == frames / 4 && got[1] == frames;
  });
}

TEST(pieces_arrive_as_one_frame_in_its_turn) {
  ForEachOfThem([](Pair* pair) { ExpectAllArrive(pair, 1000); });
}

TEST(pieces_are_authenticated_as_packed_frames_are) {
  Config config = SmallConfig();
  config.tcp_mac = "all";
  ForEachOfThem([](Pair* pair) { ExpectAllArrive(pair, 100); }, config);
}

// A kernel that has little room takes part of a long frame: the rest is copied before SendPieces
// returns.
TEST(what_the_kernel_does_not_take_is_kept) {
  constexpr size_t kLong = size_t{1} << 20;
  Config config;
  config.segment_bytes = kLong;
  const auto body = [](Pair* pair) {
    const int least = 1;
    std::vector<Watched> sockets;
    pair->a->Watch(&sockets);
    for (const Watched& one : sockets) {
      CHECK(::setsockopt(one.fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)) == 0);
    }
    std::mt19937 random(19);
    for (uint64_t ticket = 0; ticket < 20; ++ticket) {
      CHECK(TrySendPieces(pair->a.get(), kLong - ticket, 4, ticket, &random));
      CHECK(!pair->a->Flushed());
      const InFrame frame = Receive(pair, pair->b.get(), Lane::kData);
      CheckFrame(frame, Lane::kData, kLong - ticket, ticket);
      pair->b->Release(Lane::kData, frame);
    }
  };
  ForEachOfThem(body, config);
}

// The lane is full until the link is pumped, and control goes first.
TEST(a_full_lane_refuses_and_recovers) {
  ForEachOfThem([](Pair* pair) {
    std::mt19937 random(13);
    uint64_t sent = 0;
    for (int refusals = 0; refusals < 3;) {
      bool moved = false;
      CHECK_OK(pair->a->Pump(&moved));
      if (TrySendPieces(pair->a.get(), 4096, 3, sent, &random)) {
        ++sent;
        refusals = 0;
      } else {
        ++refusals;
        CHECK(pair->a->WantsWrite());
      }
      CHECK(sent < 100000);
    }
    CHECK(TrySend(pair->a.get(), Lane::kControl, 480, 77));
    const InFrame control = Receive(pair, pair->b.get(), Lane::kControl);
    CheckFrame(control, Lane::kControl, 480, 77);
    for (uint64_t ticket = 0; ticket < sent; ++ticket) {
      const InFrame frame = Receive(pair, pair->b.get(), Lane::kData);
      CheckFrame(frame, Lane::kData, 4096, ticket);
      pair->b->Release(Lane::kData, frame);
    }
    PumpUntil(pair, [&] { return TrySendPieces(pair->a.get(), 5, 2, sent, &random); });
    CHECK_EQ(pair->a->data_frames_sent(), sent + 1);
    CHECK_EQ(pair->a->data_bytes_sent(), 4096 * sent + 5);
    // Nobody wants to send any more: nothing is to wake the sender.
    PumpUntil(pair, [&] { return pair->a->Flushed() && !pair->a->WantsWrite(); });
  });
}

TEST(too_long_a_payload_is_an_error_of_the_sender) {
  ForEachOfThem([](Pair* pair) {
    std::mt19937 random(17);
    CHECK(!TrySendPieces(pair->a.get(), 4097, 2, 0, &random));
    bool moved = false;
    CHECK(!pair->a->Pump(&moved).ok());
  });
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
