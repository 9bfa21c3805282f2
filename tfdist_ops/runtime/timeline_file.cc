#include "runtime/timeline_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/logging.h"

namespace tfdist {
namespace {

constexpr int64_t kSpare = 64;  // for the last line

}  // namespace

const char kTimelineEnd[] = "{\"type\":\"end\"}\n";

TimelineFile::TimelineFile(std::string path, std::string head, int64_t limit_bytes)
    : path_(std::move(path)), head_(std::move(head)), limit_bytes_(limit_bytes) {}

TimelineFile::~TimelineFile() {
  if (fd_ >= 0) close(fd_);
}

StatusOr<std::unique_ptr<TimelineFile>> TimelineFile::Open(const std::string& path,
                                                           const std::string& head,
                                                           int64_t limit_bytes) {
  std::unique_ptr<TimelineFile> file(new TimelineFile(path, head, limit_bytes));
  unlink((path + ".old").c_str());  // of an earlier job
  TFDIST_RETURN_IF_ERROR(file->Begin());
  return file;
}

Status TimelineFile::Begin() {
  // Not O_TRUNC: what is there may be a link; a new file takes its place.
  unlink(path_.c_str());
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  int error = errno;
  if (fd_ >= 0) {
    written_bytes_ = 0;
    error = Write(head_ + "\n");
    if (fd_ >= 0) return Status();
  }
  const std::string text = "cannot write the timeline " + path_ + ": " + std::strerror(error);
  return Status(Code::kInvalidArgument, text,
                ErrorRecord{"invalid_argument", -1, "", 0, "", text, ""});
}

void TimelineFile::Add(const std::string& lines) {
  for (size_t begin = 0; begin < lines.size() && fd_ >= 0;) {
    const int64_t left = limit_bytes_ / 2 - kSpare - written_bytes_;
    const auto room = static_cast<size_t>(std::max<int64_t>(0, left));
    size_t end = lines.size();
    if (end - begin > room) {  // as many lines as there is room for
      const size_t last = room > 0 ? lines.rfind('\n', begin + room - 1) : std::string::npos;
      if (last == std::string::npos || last < begin) {
        Turn();
        continue;
      }
      end = last + 1;
    }
    Write(lines.substr(begin, end - begin));
    begin = end;
  }
}

void TimelineFile::End() {
  Write(kTimelineEnd);
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

std::string TimelineFile::Text() const {
  std::ifstream in(path_, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

void TimelineFile::Turn() {
  close(std::exchange(fd_, -1));
  std::rename(path_.c_str(), (path_ + ".old").c_str());
  const Status status = Begin();
  if (!status.ok()) TFDIST_LOG(kWarning, -1, "TIMELINE", status.message());
}

// A disk that is full ends the timeline, not the training. Returns the error, 0 for none.
int TimelineFile::Write(const std::string& text) {
  for (size_t done = 0; done < text.size() && fd_ >= 0;) {
    const ssize_t count = write(fd_, text.data() + done, text.size() - done);
    if (count > 0) {
      done += static_cast<size_t>(count);
      written_bytes_ += count;
    } else if (errno != EINTR) {
      const int error = errno;
      TFDIST_LOG(kWarning, -1, "TIMELINE", path_ << " ends here: " << std::strerror(error));
      close(std::exchange(fd_, -1));
      return error;
    }
  }
  return 0;
}

}  // namespace tfdist
