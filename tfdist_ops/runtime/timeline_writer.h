// TimelineWriter: the thread that writes a rank's timeline to FOLDER/rank-N.jsonl while the job
// runs, so that a rank that is killed leaves what it did until a moment ago.
//
// A rank that does not see the folder of rank 0 also sends its lines there (Forward), through its
// engine; rank 0 writes them beside its own (Receive). Without a timeline there is none of this: no
// file, no thread, a null pointer in the engine.
#ifndef TFDIST_OPS_RUNTIME_TIMELINE_WRITER_H_
#define TFDIST_OPS_RUNTIME_TIMELINE_WRITER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "runtime/timeline_file.h"
#include "scheduler/timeline.h"

namespace tfdist {

class TimelineWriter {
 public:
  using Send = std::function<void(std::string lines)>;

  // `head`: the first line of the file, JSON. An error: the file can't be written.
  static StatusOr<std::unique_ptr<TimelineWriter>> Open(std::shared_ptr<Timeline> timeline,
                                                        const std::string& folder, int rank,
                                                        const std::string& head,
                                                        int64_t limit_bytes);
  ~TimelineWriter();

  // Sends what has been written so far, and from now on all that is written.
  void Forward(Send send);
  // Lines that another rank has sent, the first of them its head. Any thread.
  void Receive(int rank, std::string lines);
  // Whether each rank that has sent lines has sent its last one.
  bool ReceivedAll();
  // Sends all that has happened, and the last line. To be called before the engine leaves.
  void EndForward();
  // Writes what has come, and the last line.
  void Close();

 private:
  TimelineWriter(std::shared_ptr<Timeline> timeline, std::string folder,
                 std::unique_ptr<TimelineFile> file, int64_t limit_bytes);
  void Run();
  void WriteNew();
  void WriteReceived();

  const std::shared_ptr<Timeline> timeline_;
  const std::string folder_;
  const int64_t limit_bytes_;
  std::mutex writing_;  // guards the four below; held while files are written
  std::unique_ptr<TimelineFile> file_;
  Send send_;
  uint64_t dropped_told_ = 0;
  std::map<int, std::unique_ptr<TimelineFile>>
      others_;        // by rank; null: ended, or can't be written
  std::mutex mutex_;  // guards the three below
  std::vector<std::pair<int, std::string>> received_;
  size_t received_bytes_ = 0;
  bool stopping_ = false;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_TIMELINE_WRITER_H_
