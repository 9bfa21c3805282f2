#include "runtime/c_api.h"

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/reducible.h"
#include "runtime/c_links.h"
#include "runtime/hidden_failures.h"
#include "runtime/process_state.h"
#include "runtime/runtime.h"
#include "transport/shm_window.h"
#include "transport/transport.h"

#ifndef TFDIST_VERSION
#define TFDIST_VERSION "0.0.0"
#endif

namespace {

using tfdist::BadArgument;
using tfdist::Config;
using tfdist::Current;
using tfdist::Fail;
using tfdist::NotInitialized;
using tfdist::Runtime;
using tfdist::Status;
using tfdist::StatusOr;
using tfdist::View;

thread_local Status failure_shown;
thread_local std::string text_shown;

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
  out->info.repeats = in.repeats != 0;
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

// Refuses a request with an invalid kind, op or split_count; hands a copy of any other to `submit`.
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

tfdist_status tfdist_last_error(void) { return View(tfdist::LastError()); }

void tfdist_abort(const char* cause, const char* detail, int32_t culprit) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime != nullptr) runtime->Abort({cause, detail, culprit});
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

void tfdist_hide_failures(int32_t on) { tfdist::HideFailures(on != 0); }

int64_t tfdist_take_hidden(void) { return tfdist::TakeHidden(); }

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
    return runtime.SubmitAndDrive(std::move(copy), id, patience_us);
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

int64_t tfdist_still_us(uint64_t* moves) {
  const std::shared_ptr<Runtime> runtime = Current();
  *moves = 0;
  return runtime != nullptr ? runtime->StillUs(moves) : 0;
}

void tfdist_report_blocked(uint64_t moves, int32_t how, const char* place) {
  const std::shared_ptr<Runtime> runtime = Current();
  if (runtime == nullptr || how < 0 || how > 2) return;
  runtime->ReportBlocked(moves, static_cast<tfdist::BlockedNote::How>(how), place);
}

int32_t tfdist_take_records(tfdist_record* out, int32_t capacity) {
  Runtime::WantRecords();
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
