#include "fake_messages.h"

#include <algorithm>
#include <cstring>

namespace tfdist {

FakeMessages::FakeMessages() : ends_{{this, 0}, {this, 1}} {}

tfdist_messages FakeMessages::TableOf(bool first) {
  tfdist_messages table{};
  table.version = TFDIST_MESSAGES_VERSION;
  table.name = "mpi";
  table.context = &ends_[first ? 0 : 1];
  table.send = [](void* context, int32_t, const void* data, size_t bytes, uint64_t* request) {
    return Begin(context, true, {0, const_cast<void*>(data), bytes}, request);
  };
  table.receive = [](void* context, int32_t, void* data, size_t bytes, uint64_t* request) {
    return Begin(context, false, {0, data, bytes}, request);
  };
  table.test = Test;
  table.cancel = Cancel;
  table.error = [](void* context) { return Of(context).network->error_.c_str(); };
  return table;
}

void FakeMessages::Break(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = error;
}

int32_t FakeMessages::Begin(void* context, bool sends, Half half, uint64_t* request) {
  const End& end = Of(context);
  FakeMessages& network = *end.network;
  const std::lock_guard<std::mutex> lock(network.mutex_);
  if (!network.error_.empty()) return -1;
  half.request = *request = ++network.last_request_;
  Direction& direction = network.directions_[sends ? end.side : 1 - end.side];
  (sends ? direction.sends : direction.receives).push_back(half);
  network.Match(&direction);
  return 0;
}

void FakeMessages::Match(Direction* direction) {
  while (!direction->sends.empty() && !direction->receives.empty()) {
    const Half& sent = direction->sends.front();
    const Half& received = direction->receives.front();
    std::memcpy(received.data, sent.data, std::min(sent.bytes, received.bytes));
    ended_[sent.request] = ended_[received.request] = sent.bytes;
    direction->sends.pop_front();
    direction->receives.pop_front();
  }
}

int32_t FakeMessages::Test(void* context, uint64_t* request, size_t* bytes) {
  FakeMessages& network = *Of(context).network;
  const std::lock_guard<std::mutex> lock(network.mutex_);
  if (!network.error_.empty()) return -1;
  const auto found = network.ended_.find(*request);
  if (found == network.ended_.end()) return 0;
  if (bytes != nullptr) *bytes = found->second;
  network.ended_.erase(found);
  return 1;
}

int32_t FakeMessages::Cancel(void* context, uint64_t* request) {
  const End& end = Of(context);
  FakeMessages& network = *end.network;
  const std::lock_guard<std::mutex> lock(network.mutex_);
  if (!network.error_.empty()) return -1;
  auto& receives = network.directions_[1 - end.side].receives;
  const auto is_it = [&](const Half& half) { return half.request == *request; };
  const auto found = std::find_if(receives.begin(), receives.end(), is_it);
  if (found == receives.end()) return 0;
  receives.erase(found);
  network.ended_[*request] = 0;
  return 0;
}

}  // namespace tfdist
