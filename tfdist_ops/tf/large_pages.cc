#include "tf/large_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace tfdist {
namespace {

// glibc's malloc takes smaller blocks from heaps, parts of which it gives back to the system now
// and then. Ranks avoid that for tensors of any size (tfdist/core/allocator.py).
constexpr uintptr_t kLeastBytes = uintptr_t{32} << 20;

}  // namespace

void AskForLargePages(const tensorflow::Tensor& output) {
#ifdef MADV_HUGEPAGE
  if (output.TotalBytes() < kLeastBytes) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<uintptr_t>(output.data());
  const uintptr_t begin = (data + page - 1) / page * page;
  const uintptr_t end = (data + output.TotalBytes()) / page * page;
  // An error is ignored: the kernel may have no huge pages, for example.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace tfdist
