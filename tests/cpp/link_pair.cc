#include "link_pair.h"

#include <sys/eventfd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_messages.h"
#include "transport/message_link.h"

namespace tfdist {

Config SmallConfig() {
  Config config;
  config.segment_bytes = 4096;
  config.shm_slots = 4;
  return config;
}

Pair::Pair(const TransportEntry& entry, const Config& config)
    : doorbell_a(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      doorbell_b(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  LinkEnds end_a;
  LinkEnds end_b;
  CHECK_OK(entry.make_pair(3, 5, doorbell_a.get(), doorbell_b.get(), config, &end_a, &end_b));
  auto made_a = entry.make(end_a, config);
  CHECK_OK(made_a.status());
  auto made_b = entry.make(end_b, config);
  CHECK_OK(made_b.status());
  a = std::move(made_a.value());
  b = std::move(made_b.value());
}

TransportEntry TcpOfThreeSockets() {
  TransportEntry entry = *FindTransport("tcp");
  entry.make_pair = [](int a, int b, int doorbell_a, int doorbell_b, const Config& config,
                       LinkEnds* end_a, LinkEnds* end_b) {
    Config three = config;
    three.tcp_sockets = 3;
    return FindTransport("tcp")->make_pair(a, b, doorbell_a, doorbell_b, three, end_a, end_b);
  };
  return entry;
}

TransportEntry TcpWithMessages() {
  TransportEntry entry = *FindTransport("tcp");
  entry.name = "mpi";
  entry.make_pair = [](int a, int b, int doorbell_a, int doorbell_b, const Config& config,
                       LinkEnds* end_a, LinkEnds* end_b) {
    const Status status =
        FindTransport("tcp")->make_pair(a, b, doorbell_a, doorbell_b, config, end_a, end_b);
    // A library lives as long as the process.
    static auto* const libraries = new std::vector<std::shared_ptr<FakeMessages>>();
    libraries->push_back(std::make_shared<FakeMessages>());
    end_a->pipe = end_b->pipe = libraries->back();
    return status;
  };
  entry.make = [](const LinkEnds& ends, const Config& config) {
    auto made = FindTransport("tcp")->make(ends, config);
    if (!made.ok()) return made;
    const auto messages = std::static_pointer_cast<FakeMessages>(ends.pipe);
    return MakeMessageLink(std::move(made.value()), messages->TableOf(ends.initiator), config);
  };
  return entry;
}

void ForEachTransport(const std::function<void(const TransportEntry&)>& body) {
  const auto run = [&](const TransportEntry& entry, const std::string& name) {
    try {
      body(entry);
    } catch (const check::Failure& failure) {
      throw check::Failure(name + ": " + failure.what());
    }
  };
  for (const TransportEntry& entry : Transports()) run(entry, entry.name);
  run(TcpOfThreeSockets(), "tcp, three sockets");
  run(TcpWithMessages(), "messages");
}

FrameHeader HeaderOf(uint64_t ticket) {
  FrameHeader header;
  header.ticket = ticket;
  header.phase = static_cast<uint16_t>(ticket + 1);
  header.slice = static_cast<uint32_t>(ticket + 2);
  header.segment = static_cast<uint32_t>(ticket + 3);
  header.type = static_cast<uint8_t>(ticket + 4);
  header.generation = 9;
  return header;
}

bool TrySend(Link* link, Lane lane, size_t bytes, uint64_t ticket) {
  MutableByteSpan room = link->BeginSend(lane, bytes);
  if (room.data() == nullptr) return false;
  CHECK_EQ(room.size(), bytes);
  for (size_t i = 0; i < bytes; ++i) room[i] = Pattern(ticket, i);
  link->CommitSend(lane, HeaderOf(ticket));
  return true;
}

void CheckFrame(const InFrame& frame, Lane lane, size_t bytes, uint64_t ticket) {
  CHECK_EQ(frame.header.ticket, ticket);
  CHECK_EQ(frame.header.lane, static_cast<uint8_t>(lane));
  CHECK_EQ(frame.header.phase, static_cast<uint16_t>(ticket + 1));
  CHECK_EQ(frame.header.slice, static_cast<uint32_t>(ticket + 2));
  CHECK_EQ(frame.header.segment, static_cast<uint32_t>(ticket + 3));
  CHECK_EQ(frame.header.type, static_cast<uint8_t>(ticket + 4));
  CHECK_EQ(frame.header.generation, 9u);
  CHECK_EQ(frame.header.payload_bytes, static_cast<uint32_t>(bytes));
  CHECK_EQ(frame.payload.size(), bytes);
  for (size_t i = 0; i < bytes; ++i) CHECK_EQ(frame.payload[i], Pattern(ticket, i));
}

void PumpUntil(Pair* pair, const std::function<bool()>& done) {
  const int64_t deadline = NowUs() + 10 * kSecondUs;
  while (!done()) {
    bool moved = false;
    CHECK_OK(pair->a->Pump(&moved));
    CHECK_OK(pair->b->Pump(&moved));
    CHECK(NowUs() < deadline);
  }
}

InFrame Receive(Pair* pair, Link* link, Lane lane) {
  InFrame frame;
  PumpUntil(pair, [&] { return link->Poll(lane, &frame); });
  return frame;
}

}  // namespace tfdist
