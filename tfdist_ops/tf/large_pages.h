// Large outputs in large pages. Where TensorFlow's memory comes from malloc, each is taken anew
// from the system and given back after use; with the allocator that ranks ask for
// (tfdist/core/allocator.py) this holds for the first ones only. Where transparent huge pages are
// given only on request ("madvise", the default of many distributions), such memory otherwise comes
// 4 KiB at a time.
#ifndef TFDIST_OPS_TF_LARGE_PAGES_H_
#define TFDIST_OPS_TF_LARGE_PAGES_H_

#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

// Call it before anything is written there. It has no effect where the system has no large pages,
// and never changes the contents.
void AskForLargePages(const tensorflow::Tensor& output);

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_LARGE_PAGES_H_
