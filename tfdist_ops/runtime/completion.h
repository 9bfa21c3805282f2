// CompletionThread: runs callbacks of finished operations, in order, away from the progress thread:
// they run and free TensorFlow things, which may take long or call back into the engine.
#ifndef TFDIST_OPS_RUNTIME_COMPLETION_H_
#define TFDIST_OPS_RUNTIME_COMPLETION_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "scheduler/engine.h"

namespace tfdist {

class CompletionThread : public CompletionSink {
 public:
  CompletionThread();
  ~CompletionThread() override;  // runs what is queued, then ends
  void Post(std::function<void()> callback) override;

 private:
  void Run();
  std::mutex mutex_;  // guards the two below
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_COMPLETION_H_
