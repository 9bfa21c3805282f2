// Messages between two ranks of this process, by the table of transport/messages.h.
#ifndef TFDIST_TESTS_CPP_FAKE_MESSAGES_H_
#define TFDIST_TESTS_CPP_FAKE_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "transport/messages.h"

namespace tfdist {

class FakeMessages {
 public:
  FakeMessages();

  // The functions as one of the two ranks calls them.
  tfdist_messages TableOf(bool first);
  // From now on, every call fails with this text.
  void Break(const std::string& error);

 private:
  struct Half {
    uint64_t request = 0;
    void* data = nullptr;
    size_t bytes = 0;
  };
  struct Direction {
    std::deque<Half> sends;
    std::deque<Half> receives;
  };
  struct End {
    FakeMessages* network;
    int side;
  };
  static End& Of(void* context) { return *static_cast<End*>(context); }
  static int32_t Begin(void* context, bool sends, Half half, uint64_t* request);
  static int32_t Test(void* context, uint64_t* request, size_t* bytes);
  static int32_t Cancel(void* context, uint64_t* request);
  void Match(Direction* direction);

  std::mutex mutex_;
  End ends_[2];
  Direction directions_[2];  // by the side that sends
  uint64_t last_request_ = 0;
  std::map<uint64_t, size_t> ended_;
  std::string error_;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_FAKE_MESSAGES_H_
