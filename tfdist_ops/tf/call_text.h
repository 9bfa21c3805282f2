// The values of an eager call that are not attributes of its operation, as one text:
//
//   "<process set> <timeout in s> <prescale> <postscale> <id of the group, or -> <name>"
//
// tfdist/collectives/tf_ops/eager_call.py writes it.
#ifndef TFDIST_OPS_TF_CALL_TEXT_H_
#define TFDIST_OPS_TF_CALL_TEXT_H_

#include <cstdint>
#include <string>

namespace tfdist {

struct CallText {
  uint32_t process_set = 0;
  double timeout_s = 0;
  double prescale = 1;
  double postscale = 1;
  std::string group;  // of gradients that this is a bucket of; empty: none
  std::string name;
};

// False: the text has another form, or a number in it is not finite.
bool ParseCallText(const std::string& text, CallText* call);

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_CALL_TEXT_H_
