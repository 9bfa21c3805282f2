// LOG lines go to stderr as "[tfdist r3 ENGINE warning] text". Level by TFDIST_LOG_LEVEL.
#ifndef TFDIST_OPS_BASE_LOGGING_H_
#define TFDIST_OPS_BASE_LOGGING_H_

#include <sstream>
#include <string>

namespace tfdist {

enum class LogLevel : int { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kSilent = 4 };

bool ParseLogLevel(const std::string& text, LogLevel* level);
void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();
void WriteLog(LogLevel level, int rank, const char* subsystem, const std::string& text);

}  // namespace tfdist

// TFDIST_LOG(kWarning, rank_, "ENGINE", "text " << value);
#define TFDIST_LOG(level, rank, subsystem, text)                                             \
  do {                                                                                       \
    if (::tfdist::LogLevel::level >= ::tfdist::GetLogLevel()) {                              \
      std::ostringstream tfdist_log_;                                                        \
      tfdist_log_ << text;                                                                   \
      ::tfdist::WriteLog(::tfdist::LogLevel::level, (rank), (subsystem), tfdist_log_.str()); \
    }                                                                                        \
  } while (false)

#endif  // TFDIST_OPS_BASE_LOGGING_H_
