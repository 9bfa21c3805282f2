// Both ends of a link in one process, and frames whose content a test can check.
#ifndef TFDIST_TESTS_CPP_LINK_PAIR_H_
#define TFDIST_TESTS_CPP_LINK_PAIR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/config.h"
#include "base/deadline.h"
#include "check.h"
#include "transport/link_support.h"
#include "transport/transport.h"

namespace tfdist {

constexpr int64_t kSecondUs = 1000000;

Config SmallConfig();

// Both ends of a link between ranks 3 and 5, and the doorbells of these ranks.
struct Pair {
  explicit Pair(const TransportEntry& entry, const Config& config = SmallConfig());

  UniqueFd doorbell_a;
  UniqueFd doorbell_b;
  std::unique_ptr<Link> a;
  std::unique_ptr<Link> b;
};

// tcp whose links have three sockets, whatever the configuration says.
TransportEntry TcpOfThreeSockets();

// tcp whose data are carried by messages, of a library within this process (fake_messages.h).
TransportEntry TcpWithMessages();

void ForEachTransport(const std::function<void(const TransportEntry&)>& body);

// Byte i of the payload of frame `ticket`.
inline uint8_t Pattern(uint64_t ticket, size_t i) {
  return static_cast<uint8_t>(ticket * 31 + i * 7 + (i >> 8));
}

// The header of frame `ticket`, as CheckFrame expects it.
FrameHeader HeaderOf(uint64_t ticket);

bool TrySend(Link* link, Lane lane, size_t bytes, uint64_t ticket);

void CheckFrame(const InFrame& frame, Lane lane, size_t bytes, uint64_t ticket);

// Pumps both ends until `done` holds. Fails after ten seconds.
void PumpUntil(Pair* pair, const std::function<bool()>& done);

InFrame Receive(Pair* pair, Link* link, Lane lane);

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_LINK_PAIR_H_
