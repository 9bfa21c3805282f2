// Shared by the kernels whose output has as many rows as the ranks have agreed on: one tensor in,
// its output allocated when that number is known. A scalar counts as one row.
#ifndef TFDIST_OPS_TF_ROWS_OP_H_
#define TFDIST_OPS_TF_ROWS_OP_H_

#include "tf/tf_bridge.h"

namespace tfdist {

// Shape function: output 0 has the shape of input 0 but for the number of rows; output 1, where
// there is one, is a vector of the set's size.
absl::Status RowsShape(tensorflow::shape_inference::InferenceContext* c);

// Input 0: the tensor. Output 0: the rows. Output 1, where there is one: tfdist_request's `rows` of
// `allocate`, int64. An operation with an input "splits", int64, gives it to the core; empty: the
// default.
class RowsOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 protected:
  absl::Status Prepare(tensorflow::OpKernelContext* ctx, Operation* op) const override;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_ROWS_OP_H_
