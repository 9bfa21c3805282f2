#include "tf/large_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace tfdist {
namespace {

// Smaller ones glibc's malloc takes from heaps, of which it gives parts back to the system now and
// then. Ranks avoid that for tensors of any size (tfdist/core/allocator.py).
constexpr uintptr_t kLeastBytes = uintptr_t{32} << 20;

}  // namespace

void AskForLargePages(const tensorflow::Tensor& output) {
#ifdef MADV_HUGEPAGE
  if (output.TotalBytes() < kLeastBytes) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<uintptr_t>(output.data());
  const uintptr_t begin = (data + page - 1) / page * page;
  const uintptr_t end = (data + output.TotalBytes()) / page * page;
  // Nothing to do about an error: a kernel that has none, for one.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace tfdist
