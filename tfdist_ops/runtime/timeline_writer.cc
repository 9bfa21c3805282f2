#include "runtime/timeline_writer.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "base/logging.h"

namespace tfdist {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(200);
constexpr size_t kMostReceived = size_t{16} << 20;  // not yet written
constexpr size_t kMostSent = size_t{32} << 10;      // as one message

// As tfdist/core/timeline/parts.py.
std::string PartPath(const std::string& folder, int rank) {
  return folder + "/rank-" + std::to_string(rank) + ".jsonl";
}

// Sends whole lines, in messages so short that none blocks a link for long.
void SendLines(const TimelineWriter::Send& send, const std::string& lines) {
  for (size_t begin = 0; begin < lines.size();) {
    size_t end = lines.size();
    if (end - begin > kMostSent) {
      const size_t last = lines.rfind('\n', begin + kMostSent);
      end = last == std::string::npos || last < begin ? lines.find('\n', begin) + 1 : last + 1;
    }
    send(lines.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace

TimelineWriter::TimelineWriter(std::shared_ptr<Timeline> timeline, std::string folder,
                               std::unique_ptr<TimelineFile> file, int64_t limit_bytes)
    : timeline_(std::move(timeline)),
      folder_(std::move(folder)),
      limit_bytes_(limit_bytes),
      file_(std::move(file)) {}

StatusOr<std::unique_ptr<TimelineWriter>> TimelineWriter::Open(std::shared_ptr<Timeline> timeline,
                                                               const std::string& folder, int rank,
                                                               const std::string& head,
                                                               int64_t limit_bytes) {
  auto file = TimelineFile::Open(PartPath(folder, rank), head, limit_bytes);
  if (!file.ok()) return file.status();
  std::unique_ptr<TimelineWriter> writer(
      new TimelineWriter(std::move(timeline), folder, std::move(file.value()), limit_bytes));
  writer->thread_ = std::thread([w = writer.get()] { w->Run(); });
  return writer;
}

TimelineWriter::~TimelineWriter() { Close(); }

void TimelineWriter::Forward(Send send) {
  std::lock_guard<std::mutex> lock(writing_);
  SendLines(send, file_->Text());
  send_ = std::move(send);
}

void TimelineWriter::Receive(int rank, std::string lines) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (received_bytes_ + lines.size() > kMostReceived) {  // the disk is slower than the ranks
    timeline_->Drop(std::count(lines.begin(), lines.end(), '\n'));
    return;
  }
  received_bytes_ += lines.size();
  received_.emplace_back(rank, std::move(lines));
}

bool TimelineWriter::ReceivedAll() {
  std::lock_guard<std::mutex> lock(writing_);
  WriteReceived();
  return std::all_of(others_.begin(), others_.end(),
                     [](const auto& other) { return other.second == nullptr; });
}

void TimelineWriter::EndForward() {
  std::lock_guard<std::mutex> lock(writing_);
  if (send_ == nullptr) return;
  WriteNew();
  send_(kTimelineEnd);
  send_ = nullptr;
}

void TimelineWriter::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
  std::lock_guard<std::mutex> lock(writing_);
  WriteNew();
  file_->End();
}

void TimelineWriter::Run() {
  pthread_setname_np(pthread_self(), "tfdist-timeline");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wake_.wait_for(lock, kPeriod, [this] { return stopping_; })) {
    lock.unlock();
    {
      std::lock_guard<std::mutex> writing(writing_);
      WriteNew();
    }
    lock.lock();
  }
}

void TimelineWriter::WriteNew() {
  std::string lines;
  timeline_->TakeLines(&lines);
  const uint64_t dropped = timeline_->dropped();
  if (dropped != dropped_told_) {
    lines += "{\"type\":\"dropped\",\"count\":" + std::to_string(dropped) + "}\n";
    dropped_told_ = dropped;
  }
  file_->Add(lines);
  if (send_ != nullptr) SendLines(send_, lines);
  WriteReceived();
}

void TimelineWriter::WriteReceived() {
  std::vector<std::pair<int, std::string>> received;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    received.swap(received_);
    received_bytes_ = 0;
  }
  for (auto& [rank, lines] : received) {
    if (others_.count(rank) == 0) {
      const size_t head = std::min(lines.find('\n'), lines.size());
      auto file = TimelineFile::Open(PartPath(folder_, rank), lines.substr(0, head), limit_bytes_);
      if (!file.ok()) TFDIST_LOG(kWarning, -1, "TIMELINE", file.status().message());
      others_[rank] = file.ok() ? std::move(file.value()) : nullptr;
      lines.erase(0, head + 1);
    }
    std::unique_ptr<TimelineFile>& file = others_[rank];
    if (file == nullptr) continue;
    if (lines == kTimelineEnd) {
      file->End();
      file = nullptr;
    } else {
      file->Add(lines);
    }
  }
}

}  // namespace tfdist
