// Outputs of many bytes in large pages. Where TensorFlow's memory comes from malloc, each is taken
// from the system anew and given back after use; where it comes from the allocator that ranks ask
// for (tfdist/core/allocator.py), that is so for the first ones alone. Where transparent huge pages
// are for who asks ("madvise", many distributions' default) such memory comes 4 KiB at a time.
#ifndef TFDIST_OPS_TF_LARGE_PAGES_H_
#define TFDIST_OPS_TF_LARGE_PAGES_H_

#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

// Before anything is written there. In vain where the system has none; the contents are the same.
void AskForLargePages(const tensorflow::Tensor& output);

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_LARGE_PAGES_H_
