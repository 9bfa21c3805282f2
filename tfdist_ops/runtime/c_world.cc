// The world of this process, through the C interface: its beginning and end, its place, and the
// links that it gets later.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/deadline.h"
#include "base/logging.h"
#include "collective/ring_order.h"
#include "runtime/c_api.h"
#include "runtime/c_links.h"
#include "runtime/process_state.h"
#include "runtime/runtime.h"
#include "transport/shm_window.h"
#include "transport/transport.h"

namespace {

using tfdist::BadArgument;
using tfdist::Config;
using tfdist::Current;
using tfdist::Fail;
using tfdist::NotInitialized;
using tfdist::OwnPid;
using tfdist::Process;
using tfdist::Runtime;
using tfdist::Status;
using tfdist::StatusOr;
using tfdist::TheProcess;

// The core owns the descriptors of tfdist_init also when it fails.
int32_t FailInit(const tfdist_world& world, Status status) {
  tfdist::CloseLinks(world.links, world.link_count);
  if (world.own_doorbell_fd >= 0) close(world.own_doorbell_fd);
  return Fail(std::move(status));
}

// Hosts are numbered by their lowest rank: each entry is one seen before, or the next number.
StatusOr<std::vector<int32_t>> HostOf(const tfdist_world& in) {
  if (in.host_of == nullptr && in.size == 1) return std::vector<int32_t>{0};
  if (in.host_of == nullptr) return BadArgument("tfdist_init: host_of is missing");
  int32_t hosts = 0;
  for (int32_t rank = 0; rank < in.size; ++rank) {
    const int32_t host = in.host_of[rank];
    if (host < 0 || host > hosts) {
      return BadArgument("tfdist_init: host_of[" + std::to_string(rank) + "] is " +
                         std::to_string(host) + "; expected 0 to " + std::to_string(hosts) +
                         ", hosts numbered by their lowest rank");
    }
    hosts = std::max(hosts, host + 1);
  }
  return std::vector<int32_t>(in.host_of, in.host_of + in.size);
}

// Names of the ranks, for messages.
void NameRanks(const tfdist_world& in, tfdist::World* world) {
  world->hosts.resize(static_cast<size_t>(in.size));
  world->pids.resize(static_cast<size_t>(in.size));
  for (int32_t i = 0; i < in.link_count; ++i) {
    const tfdist_link& link = in.links[i];
    if (link.peer < 0 || link.peer >= in.size) continue;  // MakeLinks refuses it
    world->hosts[static_cast<size_t>(link.peer)] = link.host;
    world->pids[static_cast<size_t>(link.peer)] = link.pid;
  }
  for (int32_t rank = 0; rank < in.size; ++rank) {
    if (in.hosts != nullptr) world->hosts[static_cast<size_t>(rank)] = in.hosts[rank];
    if (in.pids != nullptr) world->pids[static_cast<size_t>(rank)] = in.pids[rank];
  }
  world->hosts[static_cast<size_t>(in.rank)] = in.host != nullptr ? in.host : "";
  world->pids[static_cast<size_t>(in.rank)] = getpid();
}

StatusOr<std::vector<tfdist::TuningRule>> CopyTuning(const tfdist_world& in) {
  std::vector<tfdist::TuningRule> out;
  for (int32_t i = 0; i < in.tuning_count; ++i) {
    const tfdist_tuning_rule& line = in.tuning[i];
    tfdist::TuningRule rule;
    rule.hosts.assign(line.hosts, line.hosts + line.host_count);
    rule.rule = {static_cast<tfdist::CollectiveKind>(line.kind), line.half != 0, line.up_to_bytes,
                 line.algorithm};
    if (!tfdist::IsAlgorithm(rule.rule.kind, rule.rule.algorithm)) {
      return BadArgument("the tuning file: expected an algorithm of " +
                         std::string(tfdist::CollectiveKindName(rule.rule.kind)) + ", one of " +
                         tfdist::KnownAlgorithms(rule.rule.kind) + "; got \"" +
                         rule.rule.algorithm + "\"");
    }
    out.push_back(std::move(rule));
  }
  return out;
}

// State of the world, except for its links.
StatusOr<tfdist::World> MakeWorld(const tfdist_world& in) {
  StatusOr<std::vector<int32_t>> host_of = HostOf(in);
  if (!host_of.ok()) return host_of.status();
  auto tuning = CopyTuning(in);
  if (!tuning.ok()) return tuning.status();
  tfdist::World world;
  world.rank = in.rank;
  world.size = in.size;
  world.local_rank = in.local_rank;
  world.local_size = in.local_size;
  world.cross_rank = in.cross_rank;
  world.cross_size = in.cross_size;
  world.sharing = in.sharing;
  world.generation = in.generation;
  world.host_of = std::move(host_of.value());
  world.tuning = std::move(tuning.value());
  world.tuning_hash = in.tuning_hash != nullptr ? in.tuning_hash : "";
  NameRanks(in, &world);
  return world;
}

// The runtime of a world that has an overlay.
StatusOr<std::shared_ptr<Runtime>> MakeOverlayRuntime(const tfdist_world& in, tfdist::World world,
                                                      tfdist::Links links, const Config& config,
                                                      int doorbell) {
  if (in.size > tfdist::Overlay::kMaxSize || in.wanted_fd < 0) {
    return BadArgument("tfdist_init: " + std::to_string(in.size) +
                       " ranks; expected at most 65536, and a wanted_fd");
  }
  auto bell = tfdist::DuplicateFd(in.wanted_fd);
  if (!bell.ok()) return bell.status();
  auto wanted = std::make_shared<tfdist::WantedLinks>(std::move(bell.value()));
  tfdist::Overlay::Hooks hooks{[wanted](int peer) { wanted->Add(peer); }, tfdist::NowUs};
  auto overlay = std::make_shared<tfdist::Overlay>(in.rank, in.size, in.generation, hooks);
  tfdist::Links all = overlay->MakeLinks(std::move(links));
  return std::make_shared<Runtime>(std::move(world), std::move(all), config, doorbell, overlay,
                                   wanted);
}

}  // namespace

extern "C" {

int32_t tfdist_init(const tfdist_world* in) {
  StatusOr<Config> config = tfdist::ConfigFromEnvironment();
  if (!config.ok()) return FailInit(*in, config.status());
  const Status algorithm = tfdist::CheckAlgorithmNames(config.value());
  if (!algorithm.ok()) return FailInit(*in, algorithm);
  tfdist::LogLevel level;
  if (tfdist::ParseLogLevel(config.value().log_level, &level)) tfdist::SetLogLevel(level);
  if (in->size < 1 || in->rank < 0 || in->rank >= in->size) {
    return FailInit(
        *in, BadArgument("tfdist_init: expected 0 <= rank < size, got rank " +
                         std::to_string(in->rank) + " and size " + std::to_string(in->size)));
  }
  const Status order = tfdist::CheckRingOrder(config.value().ring_order, in->size);
  if (!order.ok()) return FailInit(*in, order);
  Process& process = TheProcess();
  std::lock_guard<std::mutex> lock(process.mutex);
  if (process.runtime != nullptr && process.pid == OwnPid()) {
    return FailInit(*in,
                    BadArgument("tfdist is already initialized; call tfdist.shutdown() first"));
  }
  StatusOr<tfdist::World> made_world = MakeWorld(*in);
  if (!made_world.ok()) return FailInit(*in, made_world.status());
  tfdist::World world = std::move(made_world.value());
  std::shared_ptr<tfdist::ShmWindow> window;
  if (in->link_count > 0 && in->own_window_fd >= 0) {
    auto made = tfdist::ShmWindow::Make(in->own_window_fd, config.value());
    if (!made.ok()) return FailInit(*in, made.status());
    window = made.value();
  }
  StatusOr<tfdist::Links> links = tfdist::MakeLinks(*in, world, window, config.value());
  if (!links.ok()) {
    if (in->own_doorbell_fd >= 0) close(in->own_doorbell_fd);
    return Fail(links.status());
  }
  const int doorbell =
      in->own_doorbell_fd >= 0 ? in->own_doorbell_fd : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  // After a fork the parent's runtime is only memory here; its threads do not exist. It is left
  // alone.
  if (process.runtime != nullptr) new std::shared_ptr<Runtime>(std::move(process.runtime));
  if (tfdist::HasOverlay(in->size, config.value())) {
    auto made = MakeOverlayRuntime(*in, std::move(world), std::move(links.value()), config.value(),
                                   doorbell);
    if (!made.ok()) {
      close(doorbell);
      return Fail(made.status());
    }
    process.runtime = std::move(made.value());
  } else {
    process.runtime = std::make_shared<Runtime>(std::move(world), std::move(links.value()),
                                                config.value(), doorbell);
  }
  process.window = std::move(window);
  process.pid = OwnPid();
  return 0;
}

void tfdist_shutdown(double timeout_s) {
  Process& process = TheProcess();
  std::shared_ptr<Runtime> runtime;
  {
    if (process.pid.load() != OwnPid()) return;
    std::lock_guard<std::mutex> lock(process.mutex);
    runtime = std::move(process.runtime);
    process.runtime = nullptr;
    process.window = nullptr;
  }
  if (runtime == nullptr) return;
  runtime->Shutdown(timeout_s);
}

int32_t tfdist_take_wanted(int32_t* ranks, int32_t capacity) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr || capacity <= 0) return 0;
  const std::vector<int32_t> wanted = runtime->TakeWanted(static_cast<size_t>(capacity));
  std::copy(wanted.begin(), wanted.end(), ranks);
  return static_cast<int32_t>(wanted.size());
}

int32_t tfdist_add_link(const tfdist_link* link) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) {
    tfdist::CloseLinks(link, 1);
    return Fail(NotInitialized());
  }
  std::shared_ptr<tfdist::ShmWindow> window;
  {
    std::lock_guard<std::mutex> lock(TheProcess().mutex);
    window = TheProcess().window;
  }
  auto made = tfdist::MakeLink(*link, runtime->world(), {-1, window}, runtime->config());
  if (!made.ok()) return Fail(made.status());
  if (!runtime->Adopt(link->peer, std::move(made.value()))) {
    return Fail(BadArgument("tfdist_add_link: this world wants no links, or has ended"));
  }
  return 0;
}

int32_t tfdist_use_messages(const tfdist_messages* messages) {
  Status status = tfdist::UseMessages(messages);
  return status.ok() ? 0 : Fail(std::move(status));
}

int32_t tfdist_is_initialized(void) { return Current() != nullptr ? 1 : 0; }

void tfdist_topology(int32_t out[6]) {
  const std::shared_ptr<Runtime> runtime = Current();
  for (int i = 0; i < 6; ++i) out[i] = -1;
  if (runtime == nullptr) return;
  const tfdist::World& world = runtime->world();
  const int32_t values[6] = {world.rank,       world.size,       world.local_rank,
                             world.local_size, world.cross_rank, world.cross_size};
  std::memcpy(out, values, sizeof(values));
}

}  // extern "C"
