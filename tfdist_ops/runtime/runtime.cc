#include "runtime/runtime.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <future>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/reducible.h"

namespace tfdist {
namespace {

constexpr size_t kRecordCapacity = 4096;

Status Invalid(const std::string& name, const std::string& message) {
  return Status(Code::kInvalidArgument, "\"" + name + "\": " + message,
                ErrorRecord{"invalid_argument", -1, "", 0, name, message, ""});
}

Status ShutDownError() {
  return Status(Code::kFailedPrecondition, "tfdist was shut down; call tfdist.init() again",
                ErrorRecord{"not_initialized", -1, "", 0, "", "shut down", ""});
}

std::string Line(const std::string& text, size_t index) {
  size_t begin = 0;
  for (; index > 0 && begin != std::string::npos; --index) begin = text.find('\n', begin) + 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

// FNV-1a, twice with different seeds: 128 bits name a group.
std::string HashText(const std::string& text) {
  std::string out;
  for (uint64_t hash : {uint64_t{0xcbf29ce484222325}, uint64_t{0x9ae16a3b2f90404f}}) {
    for (unsigned char c : text) hash = (hash ^ c) * uint64_t{0x100000001b3};
    char buffer[20];
    std::snprintf(buffer, sizeof(buffer), "%016llx", static_cast<unsigned long long>(hash));
    out += buffer;
  }
  return out;
}

}  // namespace

Runtime::Runtime(World world, Links links, const Config& config, int doorbell_fd)
    : world_(std::move(world)), config_(config) {
  Engine::Hooks hooks;
  hooks.completions = &completions_;
  hooks.allocated = [this](uint64_t ticket, void* memory) {
    progress_->Push([ticket, memory](Engine* engine, int64_t now_us) {
      engine->Allocated(ticket, memory, now_us);
    });
  };
  hooks.failed = [this](const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = status;
  };
  hooks.finished = [this](const FinishedRecord& record) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() == kRecordCapacity) records_.pop_front();
    records_.push_back(record);
  };
  hooks.stepped = [this](int64_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    good_steps_ = count;
  };
  auto engine = std::make_unique<Engine>(world_, std::move(links), config_, std::move(hooks));
  progress_ = std::make_unique<Progress>(std::move(engine), doorbell_fd, config_.spin_us);
}

Runtime::~Runtime() { Shutdown(0); }

Status Runtime::CheckRequest(const Request& request, int size) {
  const RequestInfo& info = request.info;
  const std::string& name = info.key;
  if (name.empty()) return Invalid(name, "an operation needs a name");
  if (!(info.timeout_s > 0) || info.timeout_s > 1e9) {
    return Invalid(name, "the timeout must be a positive number of seconds");
  }
  if (!request.group.empty() &&
      (info.kind != CollectiveKind::kAllreduce || request.bucket_index < 0 ||
       request.bucket_index >= request.bucket_count)) {
    return Invalid(name, "a bucket of a group is an allreduce with 0 <= bucket < bucket_count");
  }
  if (info.kind == CollectiveKind::kBarrier || info.kind == CollectiveKind::kRegister) {
    return Status();
  }
  if (DTypeSize(info.dtype) == 0) {
    return Invalid(name, "dtype number " + std::to_string(static_cast<int>(info.dtype)) +
                             " is not supported; cast to a number or bool");
  }
  if (info.kind == CollectiveKind::kAllreduce) {
    const Status reducible = CheckReducible(info.dtype, info.op);
    if (!reducible.ok()) return Invalid(name, reducible.message());
    if (!TakesScale(info.dtype) && (info.prescale != 1.0 || info.postscale != 1.0)) {
      return Invalid(name,
                     std::string("prescale and postscale need a floating or complex dtype, got ") +
                         DTypeName(info.dtype) + "; cast, or scale yourself");
    }
    if (!std::isfinite(info.prescale) || !std::isfinite(info.postscale)) {
      return Invalid(name, "prescale and postscale must be finite");
    }
  }
  if (info.kind == CollectiveKind::kBroadcast && (info.root < 0 || info.root >= size)) {
    return Invalid(name, "root must be a rank in [0, " + std::to_string(size) + "), got " +
                             std::to_string(info.root));
  }
  if (info.kind == CollectiveKind::kAllgather && request.tensors.size() != 1) {
    return Invalid(name, "allgather takes one tensor");
  }
  return Status();
}

Status Runtime::Submit(std::unique_ptr<Request> request, uint64_t* id) {
  if (request->info.timeout_s <= 0) request->info.timeout_s = config_.timeout_s;
  TFDIST_RETURN_IF_ERROR(CheckRequest(*request, world_.size));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (shut_down_) return ShutDownError();
  }
  for (const TensorView& tensor : request->tensors) {
    request->bytes += tensor.elements * static_cast<int64_t>(DTypeSize(request->info.dtype));
  }
  request->id = next_id_.fetch_add(1);
  if (id != nullptr) *id = request->id;
  // A std::function must be copyable, a request is not.
  auto shared = std::make_shared<std::unique_ptr<Request>>(std::move(request));
  if (!progress_->Push([shared](Engine* engine, int64_t now_us) {
        engine->Submit(std::move(*shared), now_us);
      })) {
    return ShutDownError();
  }
  return Status();
}

void Runtime::Cancel(uint64_t id) {
  progress_->Push([id](Engine* engine, int64_t now_us) { engine->Cancel(id, now_us); });
}

void Runtime::Abort(const std::string& cause) {
  progress_->Push([cause](Engine* engine, int64_t now_us) { engine->AbortWith(cause, now_us); });
}

Status Runtime::RegisterGroup(const std::string& description, std::vector<uint8_t>* present,
                              double timeout_s, std::string* id) {
  *id = HashText(description);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = groups_.find(description);
    if (known != groups_.end()) {
      for (size_t i = 0; i < present->size(); ++i) {
        if ((*present)[i] == 0 || known->second[i] != 0) continue;
        const std::string text = Line(description, i) +
                                 " has a gradient now, but had none on any rank when the list of "
                                 "gradients was first seen";
        return Status(Code::kFailedPrecondition,
                      text + "; pass the same variables with gradients from the first step on",
                      ErrorRecord{"mismatch", world_.rank, "", 0, "gradients", text, ""});
      }
      *present = known->second;
      return Status();
    }
  }
  auto request = std::make_unique<Request>();
  request->info.key = "gradients " + id->substr(0, 12);
  request->info.kind = CollectiveKind::kRegister;
  request->info.description = description;
  request->info.present = *present;
  request->info.timeout_s = timeout_s;
  auto answer = std::make_shared<std::vector<uint8_t>>();
  auto promise = std::make_shared<std::promise<Status>>();
  std::future<Status> future = promise->get_future();
  request->agreed = [answer](const Response& response) { *answer = response.present; };
  request->done = [promise](const Status& status) { promise->set_value(status); };
  TFDIST_RETURN_IF_ERROR(Submit(std::move(request), nullptr));
  const Status status = future.get();  // bounded: the engine ends every request by its deadline
  TFDIST_RETURN_IF_ERROR(status);
  *present = *answer;
  std::lock_guard<std::mutex> lock(mutex_);
  groups_[description] = *present;
  return Status();
}

void Runtime::Shutdown(double timeout_s) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_down_) return;
    shut_down_ = true;
  }
  if (timeout_s >= 0) {
    progress_->Push([](Engine* engine, int64_t now_us) { engine->Leave(now_us); });
  }
  const int64_t deadline_us = NowUs() + static_cast<int64_t>(timeout_s * 1e6);
  bool left = false;
  while (!left && NowUs() < deadline_us) {
    auto promise = std::make_shared<std::promise<bool>>();
    std::future<bool> future = promise->get_future();
    progress_->Push([promise](Engine* engine, int64_t) { promise->set_value(engine->Left()); });
    left = future.get();
    if (!left) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  progress_->Stop();
}

Status Runtime::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

int64_t Runtime::good_steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return good_steps_;
}

std::vector<FinishedRecord> Runtime::TakeRecords(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t count = std::min(capacity, records_.size());
  std::vector<FinishedRecord> out(records_.begin(),
                                  records_.begin() + static_cast<std::ptrdiff_t>(count));
  records_.erase(records_.begin(), records_.begin() + static_cast<std::ptrdiff_t>(count));
  return out;
}

std::string Runtime::CountersJson() {
  auto promise = std::make_shared<std::promise<std::string>>();
  std::future<std::string> future = promise->get_future();
  if (!progress_->Push(
          [promise](Engine* engine, int64_t) { promise->set_value(engine->CountersJson()); })) {
    return "{}";
  }
  return future.get();
}

}  // namespace tfdist
