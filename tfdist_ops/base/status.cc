#include "base/status.h"

#include <cstdio>
#include <cstring>

namespace tfdist {

std::string JsonQuote(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c < 0x20 || c == 0x7f) {
      char buffer[8];
      std::snprintf(buffer, sizeof(buffer), "\\u%04x", c);
      out += buffer;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string Shortened(const std::string& text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  const auto continues = [&](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;  // the rest of a character
  };
  size_t end = most_bytes;
  while (end > 0 && continues(end)) --end;
  return text.substr(0, end);
}

std::string ErrorRecord::ToJson() const {
  std::string out = "{\"kind\": " + JsonQuote(kind);
  if (rank >= 0) out += ", \"rank\": " + std::to_string(rank);
  if (!host.empty()) out += ", \"host\": " + JsonQuote(host);
  if (pid > 0) out += ", \"pid\": " + std::to_string(pid);
  if (!tensor.empty()) out += ", \"tensor\": " + JsonQuote(tensor);
  if (!cause.empty()) out += ", \"cause\": " + JsonQuote(cause);
  if (!detail.empty()) out += ", \"detail\": " + JsonQuote(detail);
  return out + "}";
}

Status InternalError(const char* file, int line, const std::string& message) {
  const char* slash = std::strrchr(file, '/');
  const std::string where =
      std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line);
  return Status(Code::kInternal, where + ": " + message + " (this is a bug in tfdist)",
                ErrorRecord{"internal", -1, "", 0, "", message, where});
}

}  // namespace tfdist
