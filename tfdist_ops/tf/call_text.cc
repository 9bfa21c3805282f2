#include "tf/call_text.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace tfdist {
namespace {

// A number and the space after it. False: there is none, and `*at` stays.
bool ReadNumber(const char** at, double* value) {
  char* end = nullptr;
  *value = std::strtod(*at, &end);
  if (end == *at || *end != ' ' || !std::isfinite(*value)) return false;
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
