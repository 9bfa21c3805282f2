// Outputs of many bytes in large pages. TensorFlow takes each from the system anew and gives it
// back after use, and where transparent huge pages are for who asks ("madvise", many distributions'
// default) it comes 4 KiB at a time.
#ifndef TFDIST_OPS_TF_LARGE_PAGES_H_
#define TFDIST_OPS_TF_LARGE_PAGES_H_

#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

// Before anything is written there. In vain where the system has none; the contents are the same.
void AskForLargePages(const tensorflow::Tensor& output);

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_LARGE_PAGES_H_
