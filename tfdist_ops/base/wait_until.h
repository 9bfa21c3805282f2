// Waits on a condition variable without a time limit.
#ifndef TFDIST_OPS_BASE_WAIT_UNTIL_H_
#define TFDIST_OPS_BASE_WAIT_UNTIL_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace tfdist {

// Since GCC 12, std::condition_variable::wait needs the symbol version GLIBCXX_3.4.30, which the
// wheel's platform, manylinux_2_34, lacks. A wait with a time limit needs no such symbol.
template <typename Predicate>
void WaitUntil(std::condition_variable* condition, std::unique_lock<std::mutex>* lock,
               Predicate predicate) {
  while (!condition->wait_for(*lock, std::chrono::hours(1), predicate)) {
  }
}

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_WAIT_UNTIL_H_
