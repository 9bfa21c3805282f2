#include "base/logging.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace tfdist {
namespace {

constexpr const char* kNames[] = {"debug", "info", "warning", "error", "silent"};

std::atomic<LogLevel>& Level() {
  static std::atomic<LogLevel> level{LogLevel::kWarning};
  return level;
}

}  // namespace

bool ParseLogLevel(const std::string& text, LogLevel* level) {
  for (int i = 0; i <= static_cast<int>(LogLevel::kSilent); ++i) {
    if (text != kNames[i]) continue;
    *level = static_cast<LogLevel>(i);
    return true;
  }
  return false;
}

void SetLogLevel(LogLevel level) { Level().store(level, std::memory_order_relaxed); }

LogLevel GetLogLevel() { return Level().load(std::memory_order_relaxed); }

void WriteLog(LogLevel level, int rank, const char* subsystem, const std::string& text) {
  std::string line = "[tfdist ";
  if (rank >= 0) line += "r" + std::to_string(rank) + " ";
  line += std::string(subsystem) + " " + kNames[static_cast<int>(level)] + "] " + text + "\n";
  // One write, so that lines of several threads and ranks do not mix.
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nowhere to complain
    done += static_cast<size_t>(n);
  }
}

}  // namespace tfdist
