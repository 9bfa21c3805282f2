#include "runtime/process_state.h"

#include <pthread.h>
#include <unistd.h>

#include <string>
#include <utility>

namespace tfdist {
namespace {

thread_local Status last_error;

// getpid() is a system call, a tenth of what an allreduce of few bytes takes; the number changes
// only in a fork.
std::atomic<pid_t> own_pid{0};

void NotePid() { own_pid = getpid(); }

}  // namespace

Process& TheProcess() {
  static Process* const process = [] {
    NotePid();
    pthread_atfork(nullptr, nullptr, NotePid);
    return new Process;
  }();
  return *process;
}

pid_t OwnPid() { return own_pid.load(std::memory_order_relaxed); }

std::shared_ptr<Runtime> Current() {
  Process& process = TheProcess();
  if (process.pid.load() != OwnPid()) return nullptr;  // a forked child has none of the threads
  std::lock_guard<std::mutex> lock(process.mutex);
  return process.runtime;
}

Status NotInitialized() {
  const Process& process = TheProcess();
  const bool forked = process.pid != 0 && process.pid != OwnPid();
  const std::string text =
      forked
          ? "this process was forked from one that called tfdist.init(); it has no engine. Start "
            "workers with the spawn method, or call tfdist in the parent only"
          : "tfdist is not initialized; call tfdist.init() first";
  return Status(Code::kFailedPrecondition, text,
                ErrorRecord{"not_initialized", -1, "", 0, "", text, ""});
}

int32_t Fail(Status status) {
  last_error = std::move(status);
  return static_cast<int32_t>(last_error.code());
}

const Status& LastError() { return last_error; }

tfdist_status View(const Status& status) {
  return {static_cast<int32_t>(status.code()), status.message().c_str(), status.payload().c_str()};
}

}  // namespace tfdist
