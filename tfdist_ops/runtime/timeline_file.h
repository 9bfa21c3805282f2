// TimelineFile: the bounded file of one rank's part of a timeline. When it is half as long as the
// limit it becomes PATH.old, in the place of an older one, and a new one begins; both begin with
// the same first line. Not thread-safe.
#ifndef TFDIST_OPS_RUNTIME_TIMELINE_FILE_H_
#define TFDIST_OPS_RUNTIME_TIMELINE_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace tfdist {

extern const char kTimelineEnd[];  // the last line: nothing is missing

class TimelineFile {
 public:
  // `head`: the first line, JSON. An error: the file can't be written.
  static StatusOr<std::unique_ptr<TimelineFile>> Open(const std::string& path,
                                                      const std::string& head, int64_t limit_bytes);
  ~TimelineFile();
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;

  // Whole lines, each far shorter than half of the limit.
  void Add(const std::string& lines);
  // The last line, for which there is always room. Then nothing is added any more.
  void End();
  // As it is now; empty when it can't be read.
  std::string Text() const;

 private:
  TimelineFile(std::string path, std::string head, int64_t limit_bytes);
  Status Begin();
  void Turn();
  int Write(const std::string& text);

  const std::string path_;
  const std::string head_;
  const int64_t limit_bytes_;
  int fd_ = -1;  // -1: nothing is written any more
  int64_t written_bytes_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_TIMELINE_FILE_H_
