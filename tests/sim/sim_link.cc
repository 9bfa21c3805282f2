#include "sim_link.h"

#include <algorithm>
#include <utility>

namespace tfdist::sim {

void SimPipe::Push(int lane, FrameHeader header, std::vector<uint8_t> bytes) {
  if (closed || reset) return;
  last_us[lane] = std::max(last_us[lane], queue->now_us() + rng->Between(low_us, high_us));
  frames[lane].push_back({header, std::move(bytes), last_us[lane]});
  ++used[lane];
  if (!cut) queue->At(last_us[lane], wake_receiver);
}

void SimPipe::Heal() {
  if (!cut) return;
  cut = false;
  for (int lane = 0; lane < 2; ++lane) {
    last_us[lane] = queue->now_us();
    for (Frame& frame : frames[lane]) {
      if (frame.arrives_us < queue->now_us()) frame.arrives_us = queue->now_us();
      last_us[lane] = std::max(last_us[lane], frame.arrives_us + rng->Between(0, high_us));
      frame.arrives_us = last_us[lane];
      queue->At(frame.arrives_us, wake_receiver);
    }
  }
  if (closed) {
    end_us = std::max({end_us, last_us[0], last_us[1]});
    queue->At(end_us, wake_receiver);
  }
}

void SimPipe::Close() {
  if (closed) return;
  closed = true;
  end_us = std::max({last_us[0], last_us[1], queue->now_us()}) + rng->Between(low_us, high_us);
  if (!silent && !cut) queue->At(end_us, wake_receiver);
}

void SimPipe::Reset() {
  reset = true;
  for (auto& lane : frames) lane.clear();
  queue->At(queue->now_us(), wake_receiver);
}

bool SimPipe::Ended() const {
  return reset || (closed && !silent && !cut && queue->now_us() >= end_us);
}

MutableByteSpan SimLink::BeginSend(Lane lane, size_t bytes) {
  const auto i = static_cast<size_t>(lane);
  if (out_->used[i] >= out_->slots[i]) return {};
  open_[i].resize(std::max<size_t>(bytes, 1));
  open_bytes_[i] = bytes;
  is_open_[i] = true;
  return {open_[i].data(), bytes};
}

void SimLink::CommitSend(Lane lane, const FrameHeader& header) {
  const auto i = static_cast<size_t>(lane);
  if (!is_open_[i]) misuse_ = "a send was committed that was not begun";
  is_open_[i] = false;
  open_[i].resize(open_bytes_[i]);
  if (lane == Lane::kData && memory_ != nullptr) memory_->last = open_[i];
  Send(lane, header, std::exchange(open_[i], {}));
}

bool SimLink::ShareSend(const FrameHeader& header, size_t bytes) {
  const auto i = static_cast<size_t>(Lane::kData);
  if (is_open_[i]) misuse_ = "a send was shared while another one was open";
  if (memory_ == nullptr || memory_->last.size() != bytes) {
    misuse_ = "a send was shared that was not the last one";
  }
  if (!misuse_.empty() || out_->used[i] >= out_->slots[i]) return false;
  Send(Lane::kData, header, memory_->last);
  return true;
}

void SimLink::Send(Lane lane, FrameHeader header, std::vector<uint8_t> bytes) {
  header.payload_bytes = static_cast<uint32_t>(bytes.size());
  header.lane = static_cast<uint8_t>(lane);
  if (lane == Lane::kData) {
    ++data_frames_sent_;
    data_bytes_sent_ += header.payload_bytes;
  }
  out_->Push(static_cast<int>(lane), header, std::move(bytes));
}

bool SimLink::Poll(Lane lane, InFrame* frame) {
  const auto i = static_cast<size_t>(lane);
  std::deque<SimPipe::Frame>& frames = in_->frames[i];
  if (in_->cut || frames.empty() || frames.front().arrives_us > in_->queue->now_us()) return false;
  frame->header = frames.front().header;
  frame->token = next_token_++;
  std::vector<uint8_t>& bytes = held_[i][frame->token];
  bytes = std::move(frames.front().bytes);
  frame->payload = {bytes.data(), bytes.size()};
  frames.pop_front();
  return true;
}

void SimLink::Release(Lane lane, const InFrame& frame) {
  const auto i = static_cast<size_t>(lane);
  if (held_[i].erase(frame.token) == 0) misuse_ = "a frame was released that was not held";
  // The room goes back over the other direction.
  if (out_->cut) {
    ++in_->returning[i];
    return;
  }
  in_->used[i] -= 1 + std::exchange(in_->returning[i], 0);
  in_->queue->After(in_->rng->Between(1, in_->high_us), in_->wake_sender);
}

Status SimLink::Pump(bool* /*moved*/) {
  if (!out_->cut) in_->used[0] -= std::exchange(in_->returning[0], 0);
  if (!out_->cut) in_->used[1] -= std::exchange(in_->returning[1], 0);
  if (in_->Ended()) {
    return Status(Code::kAborted,
                  "rank " + std::to_string(peer_) +
                      (in_->reset ? ": connection reset" : " closed its connection"));
  }
  return Status();
}

}  // namespace tfdist::sim
