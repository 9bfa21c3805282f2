// State shared by the files of the C interface: the one rank of this process, and errors on their
// way out.
#ifndef TFDIST_OPS_RUNTIME_PROCESS_STATE_H_
#define TFDIST_OPS_RUNTIME_PROCESS_STATE_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "runtime/c_api.h"
#include "runtime/runtime.h"
#include "transport/shm_window.h"

namespace tfdist {

struct Process {
  // Guards runtime and window. In a forked child of `pid` it may be held for ever; only tfdist_init
  // takes it there.
  std::mutex mutex;
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<ShmWindow> window;  // of the runtime's links
  std::atomic<pid_t> pid{0};
};

// Never destroyed by exit handlers: threads of TensorFlow may still run.
Process& TheProcess();
// The pid of this process; valid after the first call of TheProcess.
pid_t OwnPid();

// The runtime of this process; null before init, after shutdown and in a forked child.
std::shared_ptr<Runtime> Current();

// FAILED_PRECONDITION, for calls that find no runtime.
Status NotInitialized();

// Keeps `status` for tfdist_last_error of this thread; returns its code.
int32_t Fail(Status status);
const Status& LastError();

// Points into `status`.
tfdist_status View(const Status& status);

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_PROCESS_STATE_H_
