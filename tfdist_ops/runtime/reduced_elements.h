// ReducedElements: how many elements of gradients were reduced, and how many of them steps of
// optimizers have used. A step whose gradients nobody can follow back to a reduction (an eager one,
// or one of a function that is given them) is refused when too few were.
#ifndef TFDIST_OPS_RUNTIME_REDUCED_ELEMENTS_H_
#define TFDIST_OPS_RUNTIME_REDUCED_ELEMENTS_H_

#include <atomic>
#include <cstdint>

namespace tfdist {

// Any thread. Relaxed: a reduction is counted before its `done`, after which its results are used.
class ReducedElements {
 public:
  // Adds, and returns the sum of all that was added.
  int64_t Count(int64_t elements) {
    return reduced_.fetch_add(elements, std::memory_order_relaxed) + elements;
  }

  // Goes on from the sum of the world before this one, of which nothing is left: so a sum that
  // somebody remembers is never of another world. Before anything is counted.
  void GoOn(int64_t sum) {
    reduced_.store(sum, std::memory_order_relaxed);
    used_.store(sum, std::memory_order_relaxed);
  }

  // Takes `elements` that were counted since the sum was `since` and that no other call has taken,
  // or none: false.
  bool Use(int64_t elements, int64_t since) {
    const int64_t reduced = Count(0);
    int64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (reduced - (used > since ? used : since) < elements) return false;
    } while (!used_.compare_exchange_weak(used, used + elements, std::memory_order_relaxed));
    return true;
  }

 private:
  std::atomic<int64_t> reduced_{0};
  std::atomic<int64_t> used_{0};
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_REDUCED_ELEMENTS_H_
