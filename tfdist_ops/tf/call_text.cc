#include "tf/call_text.h"

#include <cmath>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace tfdist {
namespace {

// A number and the space after it. False: there is none, and `*at` stays. Not strtod: it expects a
// decimal comma if the program has set such a locale.
bool ReadNumber(const char** at, double* value) {
  const char* end = std::strchr(*at, ' ');
  if (end == nullptr) return false;
  const absl::string_view text(*at, static_cast<size_t>(end - *at));
  if (!absl::SimpleAtod(text, value) || !std::isfinite(*value)) return false;
  *at = end + 1;
  return true;
}

}  // namespace

bool ParseCallText(const std::string& text, CallText* call) {
  const char* at = text.c_str();
  double process_set = 0;
  if (!ReadNumber(&at, &process_set) || process_set < 0 || process_set > UINT32_MAX) return false;
  call->process_set = static_cast<uint32_t>(process_set);
  if (!ReadNumber(&at, &call->timeout_s) || !ReadNumber(&at, &call->prescale) ||
      !ReadNumber(&at, &call->postscale)) {
    return false;
  }
  const char* end = std::strchr(at, ' ');
  if (end == nullptr) return false;
  call->group.assign(at, end);
  if (call->group == "-") call->group.clear();
  call->name = end + 1;
  return true;
}

}  // namespace tfdist
