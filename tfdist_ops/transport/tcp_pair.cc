#include "transport/tcp_pair.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <utility>
#include <vector>

#include "base/config.h"
#include "transport/frame_mac.h"

namespace tfdist {

namespace {

// Two connected sockets.
Status Connect(UniqueFd* a, UniqueFd* b) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (listener.get() < 0 || client.get() < 0) return SystemError("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  // Connecting before accepting is fine: the kernel completes it from the backlog.
  if (::bind(listener.get(), generic, length) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &length) != 0 ||
      ::connect(client.get(), generic, length) != 0) {
    return SystemError("connect two sockets over the loopback");
  }
  UniqueFd server(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (server.get() < 0) return SystemError("accept");
  *a = std::move(client);
  *b = std::move(server);
  return Status();
}

}  // namespace

Status MakeTcpPair(int a, int b, int doorbell_a, int doorbell_b, const Config& config,
                   LinkEnds* end_a, LinkEnds* end_b) {
  const auto sockets = static_cast<size_t>(config.tcp_sockets);
  std::vector<UniqueFd> of_a(sockets);
  std::vector<UniqueFd> of_b(sockets);
  for (size_t i = 0; i < sockets; ++i) TFDIST_RETURN_IF_ERROR(Connect(&of_a[i], &of_b[i]));
  std::vector<uint8_t> key(sockets * kLinkKeyBytes);
  if (::getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    return SystemError("getrandom");
  }
  *end_a = LinkEnds{a, b, of_a[0].release(), -1, doorbell_a, -1, true, nullptr, key};
  *end_b = LinkEnds{b, a, of_b[0].release(), -1, doorbell_b, -1, false, nullptr, key};
  for (size_t i = 1; i < sockets; ++i) {
    end_a->more_sockets.push_back(of_a[i].release());
    end_b->more_sockets.push_back(of_b[i].release());
  }
  return Status();
}

}  // namespace tfdist
