// The name by which the compiled function finds the code that reduces a group.
#ifndef TFDIST_OPS_XLA_GROUP_CALL_H_
#define TFDIST_OPS_XLA_GROUP_CALL_H_

#include <string_view>

namespace tfdist {

inline constexpr std::string_view kGroupCall = "tfdist_reduce_group";

}  // namespace tfdist

#endif  // TFDIST_OPS_XLA_GROUP_CALL_H_
