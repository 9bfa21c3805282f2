#include "runtime/completion.h"

#include <pthread.h>

#include <utility>

#include "base/wait_until.h"

namespace tfdist {

CompletionThread::CompletionThread() : thread_([this] { Run(); }) {}

CompletionThread::~CompletionThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void CompletionThread::Post(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(callback));
  }
  wake_.notify_one();
}

void CompletionThread::Run() {
  pthread_setname_np(pthread_self(), "tfdist-done");
  std::deque<std::function<void()>> batch;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      WaitUntil(&wake_, &lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      batch.swap(queue_);
    }
    for (auto& callback : batch) {
      callback();
      callback = nullptr;  // frees what it owns here, before the next one runs
    }
    batch.clear();
  }
}

}  // namespace tfdist
