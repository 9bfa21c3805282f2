#include "runtime/c_api.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/deadline.h"
#include "base/logging.h"
#include "base/reducible.h"
#include "collective/ring_order.h"
#include "runtime/c_links.h"
#include "runtime/runtime.h"
#include "transport/shm_window.h"
#include "transport/transport.h"

#ifndef TFDIST_VERSION
#define TFDIST_VERSION "0.0.0"
#endif

namespace {

using tfdist::BadArgument;
using tfdist::Code;
using tfdist::Config;
using tfdist::ErrorRecord;
using tfdist::Runtime;
using tfdist::Status;
using tfdist::StatusOr;

// The process's one rank. Never destroyed by exit handlers: threads of TensorFlow may still run.
struct Process {
  std::mutex mutex;  // guards runtime; never taken in a forked child of `pid`, where it may be held
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<tfdist::ShmWindow> window;  // of the runtime's links; likewise
  std::atomic<pid_t> pid{0};
};

Process& TheProcess() {
  static auto* process = new Process;
  return *process;
}

std::shared_ptr<Runtime> Current() {
  Process& process = TheProcess();
  if (process.pid.load() != getpid()) return nullptr;  // a forked child has none of the threads
  std::lock_guard<std::mutex> lock(process.mutex);
  return process.runtime;
}

thread_local Status last_error;
thread_local Status failure_shown;
thread_local std::string text_shown;

int32_t Fail(Status status) {
  last_error = std::move(status);
  return static_cast<int32_t>(last_error.code());
}

tfdist_status View(const Status& status) {
  return {static_cast<int32_t>(status.code()), status.message().c_str(), status.payload().c_str()};
}

Status NotInitialized() {
  const Process& process = TheProcess();
  const bool forked = process.pid != 0 && process.pid != getpid();
  const std::string text =
      forked
          ? "this process was forked from one that called tfdist.init(); it has no engine. Start "
            "workers with the spawn method, or call tfdist in the parent only"
          : "tfdist is not initialized; call tfdist.init() first";
  return Status(Code::kFailedPrecondition, text,
                ErrorRecord{"not_initialized", -1, "", 0, "", text, ""});
}

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

void CopyRequest(const tfdist_request& in, tfdist::Request* out) {
  out->info.key = in.name != nullptr ? in.name : "";
  out->info.kind = static_cast<tfdist::CollectiveKind>(in.kind);
  out->info.dtype = static_cast<tfdist::DType>(in.dtype);
  out->info.op = static_cast<tfdist::ReduceOp>(in.op);
  out->info.root = in.root;
  out->info.peer = in.peer;
  out->info.splits.assign(in.splits, in.splits + in.split_count);
  out->info.prescale = in.prescale;
  out->info.postscale = in.postscale;
  out->info.timeout_s = in.timeout_s;
  out->info.set = in.process_set;
  out->info.algorithm = in.algorithm != nullptr ? in.algorithm : "";
  if (in.group != nullptr && in.group[0] != '\0') {
    out->group = in.group;
    out->bucket_index = in.bucket;
    out->bucket_count = in.bucket_count;
    out->info.bucket = true;
  }
  std::vector<std::vector<int64_t>>& shapes = out->info.shapes;
  shapes.resize(out->info.bucket ? 1 : static_cast<size_t>(in.tensor_count));
  int64_t total = 0;
  for (int32_t i = 0; i < in.tensor_count; ++i) {
    const tfdist_tensor& tensor = in.tensors[i];
    const int64_t* end = tensor.dims + tensor.rank;
    const int64_t elements =
        std::accumulate(tensor.dims, end, int64_t{1}, std::multiplies<int64_t>());
    out->tensors.push_back({static_cast<const uint8_t*>(tensor.input),
                            static_cast<uint8_t*>(tensor.output), elements, tensor.hint});
    if (!out->info.bucket) shapes[static_cast<size_t>(i)].assign(tensor.dims, end);
    total += elements;
  }
  if (out->info.bucket) shapes[0].assign(1, total);
  out->done = [done = in.done, context = in.context](const Status& status) {
    const tfdist_status view = View(status);
    done(context, &view);
  };
  if (in.allocate != nullptr) {
    out->allocate = [allocate = in.allocate, context = in.context](const std::vector<int64_t>& rows,
                                                                   int64_t output_rows) {
      return allocate(context, rows.data(), static_cast<int32_t>(rows.size()), output_rows);
    };
  }
}

// Hands a copy of a request that may be valid to `submit`.
template <typename Submit>
int32_t WithRequest(const tfdist_request& request, Submit submit) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return Fail(NotInitialized());
  const bool is_kind = request.kind >= TFDIST_ALLREDUCE && request.kind <= TFDIST_SENDRECV &&
                       request.kind != static_cast<int32_t>(tfdist::CollectiveKind::kRegister);
  if (!is_kind || request.op < 0 || request.op > static_cast<int32_t>(tfdist::kLastReduceOp) ||
      request.split_count < 0) {
    return Fail(BadArgument("tfdist_submit: kind, op or split_count is not valid"));
  }
  std::unique_ptr<tfdist::Request> copy = runtime->NewRequest();
  CopyRequest(request, copy.get());
  Status status = submit(*runtime, std::move(copy));
  return status.ok() ? 0 : Fail(std::move(status));
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
    return FailInit(*in, BadArgument("tfdist_init: rank and size do not fit together"));
  }
  const Status order = tfdist::CheckRingOrder(config.value().ring_order, in->size);
  if (!order.ok()) return FailInit(*in, order);
  Process& process = TheProcess();
  std::lock_guard<std::mutex> lock(process.mutex);
  if (process.runtime != nullptr && process.pid == getpid()) {
    return FailInit(*in,
                    BadArgument("tfdist is already initialized; call tfdist.shutdown() first"));
  }
  StatusOr<std::vector<int32_t>> host_of = HostOf(*in);
  if (!host_of.ok()) return FailInit(*in, host_of.status());
  tfdist::World world;
  world.rank = in->rank;
  world.size = in->size;
  world.local_rank = in->local_rank;
  world.local_size = in->local_size;
  world.cross_rank = in->cross_rank;
  world.cross_size = in->cross_size;
  world.generation = in->generation;
  world.host_of = std::move(host_of.value());
  auto tuning = CopyTuning(*in);
  if (!tuning.ok()) return FailInit(*in, tuning.status());
  world.tuning = std::move(tuning.value());
  world.tuning_hash = in->tuning_hash != nullptr ? in->tuning_hash : "";
  NameRanks(*in, &world);
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
  process.pid = getpid();
  return 0;
}

void tfdist_shutdown(double timeout_s) {
  Process& process = TheProcess();
  std::shared_ptr<Runtime> runtime;
  {
    if (process.pid.load() != getpid()) return;
    std::lock_guard<std::mutex> lock(process.mutex);
    runtime = std::move(process.runtime);
    process.runtime = nullptr;
    process.window = nullptr;
  }
  if (runtime != nullptr) runtime->Shutdown(timeout_s);
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

int32_t tfdist_is_initialized(void) { return Current() != nullptr ? 1 : 0; }

tfdist_status tfdist_last_error(void) { return View(last_error); }

void tfdist_topology(int32_t out[6]) {
  const std::shared_ptr<Runtime> runtime = Current();
  for (int i = 0; i < 6; ++i) out[i] = -1;
  if (runtime == nullptr) return;
  const tfdist::World& world = runtime->world();
  const int32_t values[6] = {world.rank,       world.size,       world.local_rank,
                             world.local_size, world.cross_rank, world.cross_size};
  std::memcpy(out, values, sizeof(values));
}

void tfdist_abort(const char* cause) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime != nullptr) runtime->Abort(cause);
}

tfdist_status tfdist_failure(void) {
  const std::shared_ptr<Runtime> runtime = Current();
  failure_shown = runtime != nullptr ? runtime->failure() : Status();
  return View(failure_shown);
}

int64_t tfdist_good_steps(void) {
  const std::shared_ptr<Runtime> runtime = Current();
  return runtime != nullptr ? runtime->good_steps() : 0;
}

const char* tfdist_config_json(void) {
  const StatusOr<Config> config = tfdist::ConfigFromEnvironment();
  if (!config.ok()) {
    Fail(config.status());
    return nullptr;
  }
  text_shown = tfdist::ConfigTableJson();
  return text_shown.c_str();
}

int64_t tfdist_shm_bytes(void) {
  const StatusOr<Config> config = tfdist::ConfigFromEnvironment();
  if (!config.ok()) {
    Fail(config.status());
    return -1;
  }
  return static_cast<int64_t>(tfdist::ShmBytes(config.value()));
}

int64_t tfdist_window_bytes(void) {
  const StatusOr<Config> config = tfdist::ConfigFromEnvironment();
  if (!config.ok()) {
    Fail(config.status());
    return -1;
  }
  return static_cast<int64_t>(tfdist::WindowBytes(config.value()));
}

const char* tfdist_build_info(void) {
  std::string text = "{\"version\": " + tfdist::JsonQuote(TFDIST_VERSION) +
                     ", \"compiler\": " + tfdist::JsonQuote(__VERSION__) + ", \"algorithms\": [";
  const char* separator = "";
  for (const auto& entry : tfdist::Algorithms()) {
    text += separator + tfdist::JsonQuote(std::string(tfdist::CollectiveKindName(entry.kind)) +
                                          "/" + entry.name);
    separator = ", ";
  }
  text += "], \"transports\": [";
  separator = "";
  for (const auto& entry : tfdist::Transports()) {
    text += separator + tfdist::JsonQuote(entry.name);
    separator = ", ";
  }
  text_shown = text + "]}";
  return text_shown.c_str();
}

int32_t tfdist_check_reducible(int32_t dtype, int32_t op) {
  if (op < 0 || op > static_cast<int32_t>(tfdist::kLastReduceOp)) {
    return Fail(BadArgument("tfdist_check_reducible: op is not valid"));
  }
  Status status =
      tfdist::CheckReducible(static_cast<tfdist::DType>(dtype), static_cast<tfdist::ReduceOp>(op));
  return status.ok() ? 0 : Fail(std::move(status));
}

const char* tfdist_algorithm(int32_t kind, int32_t dtype, int64_t bytes, const char* wanted) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) {
    Fail(NotInitialized());
    return nullptr;
  }
  const tfdist::AlgorithmEntry* entry = runtime->AlgorithmFor(
      static_cast<tfdist::CollectiveKind>(kind), static_cast<tfdist::DType>(dtype), bytes,
      wanted != nullptr ? wanted : "");
  if (entry == nullptr) {
    Fail(BadArgument("tfdist_algorithm: no such algorithm for this operation, type and size"));
    return nullptr;
  }
  return entry->name;
}

int32_t tfdist_submit(const tfdist_request* request, uint64_t* id) {
  return WithRequest(*request, [id](Runtime& runtime, std::unique_ptr<tfdist::Request> copy) {
    return runtime.Submit(std::move(copy), id);
  });
}

int32_t tfdist_submit_and_help(const tfdist_request* request, uint64_t* id, int64_t patience_us) {
  return WithRequest(*request, [&](Runtime& runtime, std::unique_ptr<tfdist::Request> copy) {
    return runtime.SubmitAndHelp(std::move(copy), id, patience_us);
  });
}

int32_t tfdist_run(const tfdist_request* request) {
  return WithRequest(*request, [](Runtime& runtime, std::unique_ptr<tfdist::Request> copy) {
    return runtime.Run(std::move(copy));
  });
}

void tfdist_cancel(uint64_t id) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime != nullptr) runtime->Cancel(id);
}

int32_t tfdist_process_set_add(const int32_t* ranks, int32_t count, double timeout_s,
                               uint32_t* id) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return Fail(NotInitialized());
  Status status = runtime->AddProcessSet(std::vector<int32_t>(ranks, ranks + count), timeout_s, id);
  return status.ok() ? 0 : Fail(std::move(status));
}

int32_t tfdist_process_set_remove(uint32_t id, double timeout_s) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return Fail(NotInitialized());
  Status status = runtime->RemoveProcessSet(id, timeout_s);
  return status.ok() ? 0 : Fail(std::move(status));
}

int32_t tfdist_register_group(uint32_t process_set, const char* description, uint8_t* present,
                              int32_t count, double timeout_s, char* id) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return Fail(NotInitialized());
  std::vector<uint8_t> flags(present, present + count);
  std::string name;
  Status status = runtime->RegisterGroup(process_set, description, &flags, timeout_s, &name);
  if (!status.ok()) return Fail(std::move(status));
  std::memcpy(present, flags.data(), flags.size());
  std::memcpy(id, name.c_str(), name.size() + 1);
  return 0;
}

int32_t tfdist_find_group(uint32_t process_set, const char* description, uint8_t* present,
                          int32_t count, char* id) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return 0;
  std::vector<uint8_t> flags(static_cast<size_t>(count));
  std::string name;
  if (!runtime->FindGroup(process_set, description, &flags, &name)) return 0;
  std::memcpy(present, flags.data(), flags.size());
  std::memcpy(id, name.c_str(), name.size() + 1);
  return 1;
}

int32_t tfdist_join(uint32_t process_set, double timeout_s, int32_t* latest, int32_t* complete) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return Fail(NotInitialized());
  Status status = runtime->Join(process_set, timeout_s, latest, complete);
  return status.ok() ? 0 : Fail(std::move(status));
}

int32_t tfdist_take_records(tfdist_record* out, int32_t capacity) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr || capacity <= 0) return 0;
  const auto records = runtime->TakeRecords(static_cast<size_t>(capacity));
  for (size_t i = 0; i < records.size(); ++i) {
    tfdist_record& to = out[i];
    std::memset(&to, 0, sizeof(to));
    std::strncpy(to.name, records[i].name.c_str(), sizeof(to.name) - 1);
    to.bytes = records[i].bytes;
    to.submitted_us = records[i].submitted_us;
    to.agreed_us = records[i].agreed_us;
    to.done_us = records[i].done_us;
    to.code = static_cast<int32_t>(records[i].code);
    to.kind = static_cast<int32_t>(records[i].kind);
  }
  return static_cast<int32_t>(records.size());
}

int32_t tfdist_timeline_start(const char* folder, const char* head) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr) return Fail(NotInitialized());
  Status status = runtime->StartTimeline(folder, head);
  return status.ok() ? 0 : Fail(std::move(status));
}

void tfdist_timeline_forward(void) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime != nullptr) runtime->ForwardTimeline();
}

void tfdist_timeline_span(const char* name, int64_t begin_us, int64_t end_us) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime != nullptr) runtime->AddSpan(name, begin_us, end_us);
}

const char* tfdist_counters_json(void) {
  const std::shared_ptr<Runtime> runtime = Current();
  text_shown = runtime != nullptr ? runtime->CountersJson() : "{}";
  return text_shown.c_str();
}

const tfdist_api_table* tfdist_api(int32_t version) {
  static const tfdist_api_table table = {TFDIST_API_VERSION, &tfdist_submit,
                                         &tfdist_cancel,     &tfdist_last_error,
                                         &tfdist_topology,   &tfdist_submit_and_help};
  return version == TFDIST_API_VERSION ? &table : nullptr;
}

}  // extern "C"
