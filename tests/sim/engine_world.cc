#include "engine_world.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace tfdist::sim {
namespace {

constexpr double kTimeoutS = 3;
constexpr int64_t kTimeoutUs = 3 * kSecond;
// After an operation's timeout: the leader's word, the grace of the others, one tick.
constexpr int64_t kGraceUs = 1500 * kMs;
// From the first evidence to an outcome, and the silence before it.
constexpr int64_t kAgreeUs = 9 * kSecond;
constexpr int64_t kTickUs = 50 * kMs;
constexpr int64_t kLeaveUs = 2 * kSecond;  // a rank waits so long for its peers' goodbyes

std::vector<int32_t> Ranks32(const std::vector<int>& ranks) {
  return std::vector<int32_t>(ranks.begin(), ranks.end());
}

// Calls with the same key come in the order of their places, wherever they stand in `calls`.
void KeepOrder(std::vector<Call>* calls) {
  std::map<std::string, std::vector<Call>> by_key;
  for (const Call& call : *calls) by_key[call.key].push_back(call);
  std::map<std::string, size_t> next;
  for (auto& [key, same] : by_key) {
    std::sort(same.begin(), same.end(),
              [](const Call& a, const Call& b) { return a.place < b.place; });
  }
  for (Call& call : *calls) {
    const std::string key = call.key;
    call = by_key[key][next[key]++];
  }
}

}  // namespace

EngineWorld::EngineWorld(uint64_t seed, bool trace) : rng_(seed), tracing_(trace) {
  size_ = static_cast<int>(rng_.Between(2, 6));
  config_.timeout_s = kTimeoutS;
  config_.stall_warning_s = 1;
  config_.log_level = "error";
  config_.segment_bytes = int64_t{64} << rng_.Between(0, 6);
  config_.shm_slots = rng_.Between(2, 6);
  config_.max_active = rng_.Chance(20) ? 1 : rng_.Between(2, 16);
  if (rng_.Chance(30)) config_.fusion_bytes = rng_.Between(0, 4000);
  if (rng_.Chance(30)) config_.allreduce_algorithm = rng_.Chance(50) ? "ring" : "pairwise";
  config_.atomic_steps = rng_.Chance(50) ? 1 : 0;
  program_ = MakeProgram(size_, &rng_);
  if (seed % 2 == 0) {
    AddJoins(&program_, &rng_);
    for (const Join& join : program_.joins) {
      std::string from;
      for (const auto& [rank, phase] : join.from) from += ' ' + std::to_string(phase);
      Trace("of \"" + join.call.set + "\" join before phases" + from + ", all before " +
            std::to_string(join.end));
    }
  }
  Build(seed);
  Plan();
}

EngineWorld::~EngineWorld() {
  // Links close their pipes; nobody is woken any more.
  for (auto& rank : ranks_) rank->state = State::kDead;
  for (auto& rank : ranks_) rank->engine.reset();
}

void EngineWorld::Build(uint64_t seed) {
  const auto n = static_cast<size_t>(size_);
  const int64_t slowest_us = rng_.Chance(30) ? 3 * kMs : 100;
  pipes_.resize(n * n);
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      auto pipe = std::make_shared<SimPipe>();
      pipe->queue = &queue_;
      pipe->rng = &rng_;
      pipe->high_us = rng_.Between(10, slowest_us);
      pipe->slots[1] = static_cast<size_t>(config_.shm_slots);
      pipe->wake_receiver = [this, to] { WakeRank(to); };
      pipe->wake_sender = [this, from] { WakeRank(from); };
      pipes_[static_cast<size_t>(from * size_ + to)] = std::move(pipe);
    }
  }
  const bool one_host = rng_.Chance(60);
  for (const auto& pipe : pipes_) pipe->one_host = one_host;
  const bool shares_memory = one_host && seed % 4 < 2;
  for (int r = 0; r < size_; ++r) {
    ranks_.push_back(std::make_unique<Rank>());
    Rank& rank = *ranks_.back();
    rank.world = this;
    rank.rank = r;
    World world;
    world.rank = r;
    world.size = size_;
    world.local_rank = one_host ? r : 0;
    world.local_size = one_host ? size_ : 1;
    world.cross_rank = one_host ? 0 : r;
    world.cross_size = one_host ? 1 : size_;
    world.generation = 7;
    world.hosts.assign(n, "simulated");
    world.pids.assign(n, 4242);
    Links links(n);
    const auto memory = shares_memory ? std::make_shared<SimMemory>() : nullptr;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == r) continue;
      links[static_cast<size_t>(peer)] =
          std::make_unique<SimLink>(peer, pipes_[static_cast<size_t>(r * size_ + peer)],
                                    pipes_[static_cast<size_t>(peer * size_ + r)], memory);
    }
    Engine::Hooks hooks;
    hooks.completions = &rank;
    hooks.allocated = [&rank](uint32_t set, uint64_t ticket, void* memory) {
      EngineWorld* world = rank.world;
      rank.commands.push_back([world, set, ticket, memory](Engine* engine) {
        engine->Allocated(set, ticket, memory, world->queue_.now_us());
      });
      world->WakeRank(rank.rank);
    };
    hooks.failed = [this, &rank](const Status& status) {
      if (rank.left) return;  // its own end
      rank.failure = status;
      rank.failed_us = queue_.now_us();
      rank.outcome = rank.engine->consensus().outcome();
      Trace("rank " + std::to_string(rank.rank) + " fails: " + status.message());
    };
    if (one_host) {
      hooks.process_state = [this](int peer) {
        const auto p = static_cast<size_t>(peer);
        if (p >= ranks_.size() || ranks_[p]->state == State::kRuns) return ProcessState::kRunning;
        return ranks_[p]->state == State::kDead ? ProcessState::kGone : ProcessState::kStopped;
      };
    }
    rank.engine = std::make_unique<Engine>(world, std::move(links), config_, hooks);
    rank.joins.resize(program_.joins.size(), JoinState::kNone);
    OnRank(r, rng_.Between(0, 2 * kMs), [this](Rank* own) { StartPhase(own); });
    ScheduleTurn(r, 0);
  }
}

// ---- running ranks ----

void EngineWorld::OnRank(int rank, int64_t at_us, std::function<void(Rank*)> body) {
  queue_.At(at_us, [this, rank, body = std::move(body)] {
    Rank& own = At(rank);
    if (own.state == State::kDead) return;
    if (Asleep(own)) {
      own.deferred.push_back([&own, body] { body(&own); });
    } else {
      body(&own);
    }
  });
}

void EngineWorld::Rank::Post(std::function<void()> callback) {
  completions.push_back(std::move(callback));
  // The completion thread runs them one after the other, some time later.
  world->OnRank(rank, world->queue_.now_us() + world->rng_.Between(1, 60), [](Rank* own) {
    if (own->completions.empty()) return;
    auto run = std::move(own->completions.front());
    own->completions.pop_front();
    run();
  });
}

void EngineWorld::WakeRank(int rank) { ScheduleTurn(rank, queue_.now_us() + 1); }

void EngineWorld::ScheduleTurn(int rank, int64_t at_us) {
  Rank& own = At(rank);
  if (own.turn_at_us >= 0 && own.turn_at_us <= at_us && own.turn_at_us >= queue_.now_us()) return;
  own.turn_at_us = at_us;
  queue_.At(at_us, [this, rank, at_us] {
    Rank& due = At(rank);
    if (due.turn_at_us != at_us || due.state == State::kDead) return;
    due.turn_at_us = -1;
    if (Asleep(due)) {
      due.turn_due = true;
    } else {
      Turn(&due);
    }
  });
}

// One turn of the rank's engine, as in runtime/progress.cc.
void EngineWorld::Turn(Rank* rank) {
  if (rank->engine == nullptr) return;
  const int64_t now_us = queue_.now_us();
  for (auto& command : std::exchange(rank->commands, {})) command(rank->engine.get());
  bool moved = rank->engine->Poll(now_us);
  if (now_us >= rank->next_tick_us) {
    rank->engine->Tick(now_us);
    rank->next_tick_us = now_us + kTickUs;
    ReportBlocked(rank);
    moved |= rank->engine->Poll(now_us);
  }
  if (rank->finished && rank->leave_by_us > 0 &&
      (rank->engine->Left() || now_us >= rank->leave_by_us)) {
    rank->left = true;
    Trace("rank " + std::to_string(rank->rank) + " has left");
    CheckLinks(*rank);
    rank->engine->Stop(now_us);
    rank->engine.reset();
    return;
  }
  ScheduleTurn(rank->rank, moved ? now_us + rng_.Between(1, 10) : rank->next_tick_us);
}

// ---- the program ----

void EngineWorld::StartPhase(Rank* rank) {
  if (rank->finished || !CallJoins(rank)) return;
  if (rank->phase == program_.phases.size()) {
    EndProgram(rank);
    return;
  }
  std::vector<Call> calls;
  int place = 0;
  for (Call call : program_.phases[rank->phase].calls) {
    call.place = place++;
    if (std::find(call.callers.begin(), call.callers.end(), rank->rank) == call.callers.end()) {
      continue;
    }
    calls.push_back(call);
  }
  rng_.Shuffle(&calls);
  KeepOrder(&calls);
  if (skipped_ == std::pair(rank->phase, rank->rank) && !calls.empty()) {
    Trace("rank " + std::to_string(rank->rank) + " leaves out " + calls.back().key);
    skipped_key_ = calls.back().key;
    calls.pop_back();
  }
  if (altered_ == std::pair(rank->phase, rank->rank)) {
    for (Call& call : calls) {
      if (call.kind != CollectiveKind::kAllreduce || !call.group.empty()) continue;
      ++call.rows;
      may_fail_ = true;
      Trace("rank " + std::to_string(rank->rank) + " has another shape for " + call.key);
      break;
    }
  }
  rank->open = calls.size();
  if (calls.empty()) {
    EndPhase(rank);
    return;
  }
  int64_t at_us = queue_.now_us();
  rank->after.clear();
  std::map<std::string, int> behind;  // key → the place that it comes after, -1: none
  for (const Call& call : calls) {
    const Call& other = calls[static_cast<size_t>(rng_.Index(calls.size()))];
    const auto [earlier, is_first] = behind.emplace(call.key, -1);
    if (earlier->second >= 0) {
      rank->after[earlier->second].push_back(call);
      continue;
    }
    // Behind the gate a step is submitted as a whole.
    const bool whole =
        config_.atomic_steps != 0 && call.kind == CollectiveKind::kAllreduce && !call.group.empty();
    if (is_first && other.place < call.place && !whole && rng_.Chance(50)) {
      rank->after[other.place].push_back(call);
      earlier->second = other.place;
      continue;
    }
    at_us += rng_.Between(0, rng_.Chance(10) ? 5 * kMs : 200);
    SubmitAt(rank, at_us, call);
  }
  // Some join while what they have called before is under way.
  for (size_t place = 0; place < program_.joins.size(); ++place) {
    const Join& join = program_.joins[place];
    const auto from = join.from.find(rank->rank);
    const bool is_last = from != join.from.end() && from->second == rank->phase + 1;
    const bool is_next = place == 0 || program_.joins[place - 1].call.set != join.call.set ||
                         program_.joins[place - 1].end <= rank->phase;
    if (!is_last || !is_next || !rank->after.empty() || !rng_.Chance(50)) continue;
    rank->joins[place] = JoinState::kCalled;
    SubmitAt(rank, at_us + rng_.Between(0, 100), join.call, static_cast<int>(place));
  }
}

void EngineWorld::EndPhase(Rank* rank) {
  ++rank->phase;
  int64_t pause_us = rng_.Between(0, rng_.Chance(10) ? 20 * kMs : 500);
  // Some leave as soon as they can: others may still need what these sent.
  if (rank->phase == program_.phases.size() && rng_.Chance(60)) pause_us = 0;
  OnRank(rank->rank, queue_.now_us() + pause_us, [this](Rank* own) { StartPhase(own); });
}

void EngineWorld::SubmitAt(Rank* rank, int64_t at_us, const Call& call, int join) {
  ++rank->due;
  OnRank(rank->rank, at_us, [this, call, join](Rank* own) {
    --own->due;
    if (!own->finished) Submit(own, call, join);
  });
}

void EngineWorld::ReportBlocked(Rank* rank) {
  const bool waits = !rank->running.empty() && rank->due == 0 && rank->commands.empty() &&
                     rank->completions.empty() && !rank->finished;
  if (!waits || !rng_.Chance(50)) return;
  rank->engine->ReportBlocked(rank->engine->moves(), BlockedNote::How::kEager,
                              "phase " + std::to_string(rank->phase));
}

void EngineWorld::Submit(Rank* rank, const Call& call, int join) {
  auto running = std::make_shared<Running>();
  running->call = call;
  running->join = join;
  running->id = next_id_++;
  auto request = std::make_unique<Request>();
  request->id = running->id;
  RequestInfo& info = request->info;
  info.key = call.key;
  info.kind = call.kind;
  info.timeout_s = kTimeoutS;
  info.root = call.root;
  info.peer = call.kind == CollectiveKind::kSendRecv ? call.peer : -1;
  if (!call.set.empty()) info.set = rank->set_ids[call.set];
  const bool has_data = call.kind != CollectiveKind::kBarrier &&
                        call.kind != CollectiveKind::kRegister &&
                        call.kind != CollectiveKind::kAddSet && call.kind != CollectiveKind::kJoin;
  if (call.kind == CollectiveKind::kRegister) {
    info.description = call.group + " float32 [1]\nop=sum";
    info.present = {1};
    request->group = call.group;
  } else if (call.kind == CollectiveKind::kAddSet) {
    info.description = SetRanksText(Ranks32(call.added));
  } else if (has_data) {
    info.dtype = call.dtype;
    running->input = Input(call, rank->rank);
    const std::vector<int64_t> shape = {InputRows(call, rank->rank), call.row_elements};
    running->output.assign(running->input.size(), 0xee);
    TensorView view;
    view.input = running->input.data();
    view.output = running->output.data();
    view.elements = ElementCount(shape);
    for (char letter : call.key) view.hint = view.hint * 31 + static_cast<uint8_t>(letter);
    request->tensors = {view};
    info.shapes = {shape};
    request->bytes = static_cast<int64_t>(running->input.size());
    if (call.average) info.op = ReduceOp::kAverage;
    info.repeats = call.repeats && call.silent != rank->rank;
    if (!call.group.empty()) {
      request->group = call.group;
      request->bucket_index = call.bucket;
      request->bucket_count = call.buckets;
      rank->applied[call.group][call.bucket];
    }
  }
  request->agreed = [running](const Response& response) { running->answer = response; };
  request->allocate = [running](const std::vector<int64_t>& /*rows*/, int64_t output_rows) {
    const size_t row_bytes =
        static_cast<size_t>(running->call.row_elements) * DTypeSize(running->call.dtype);
    running->output.assign(static_cast<size_t>(output_rows) * row_bytes + 1, 0xee);
    running->output.pop_back();  // memory also where there are no rows
    return static_cast<void*>(running->output.data());
  };
  const int number = rank->rank;
  request->done = [this, number, running](const Status& status) {
    Done(&At(number), running, status);
  };
  Trace("rank " + std::to_string(rank->rank) + " calls " + CollectiveKindName(call.kind) + " \"" +
        call.key + "\" [" + std::to_string(InputRows(call, rank->rank)) + "," +
        std::to_string(call.row_elements) + "]");
  running->deadline_us = queue_.now_us() + kTimeoutUs + kGraceUs;
  rank->running[running->id] = running;
  auto shared = std::make_shared<std::unique_ptr<Request>>(std::move(request));
  rank->commands.push_back(
      [this, shared](Engine* engine) { engine->Submit(std::move(*shared), queue_.now_us()); });
  WakeRank(rank->rank);
}

void EngineWorld::Done(Rank* rank, const std::shared_ptr<Running>& running, const Status& status) {
  const Call& call = running->call;
  const std::string name = "rank " + std::to_string(rank->rank) + ", " +
                           CollectiveKindName(call.kind) + " \"" + call.key + "\"";
  if (++running->done > 1) Violation(name + " ended twice");
  rank->running.erase(running->id);
  Trace(name + " ends: " + (status.ok() ? "OK" : status.message()));
  Digest(static_cast<uint64_t>(queue_.now_us()));
  Digest(static_cast<uint64_t>(status.code()));
  if (status.ok()) {
    ++result_.operations;
    if (!call.group.empty() && call.kind == CollectiveKind::kAllreduce) {
      ++rank->applied[call.group][call.bucket];
    }
    if (call.kind == CollectiveKind::kJoin) {
      EndJoin(rank, *running);
      return;
    }
    // A sender gets nothing.
    const bool sends = call.kind == CollectiveKind::kSendRecv && rank->rank == call.root;
    // A call that one rank left out pairs its next one of that name with the others' last.
    // A rank that joins is not waited for where it has called less than the program says.
    const bool skewed =
        !skipped_key_.empty() && (call.key == skipped_key_ || !program_.joins.empty());
    const bool bytes = !sends && !skewed && (!running->input.empty() || !running->output.empty());
    if (bytes && running->output != Expected(call, rank->rank)) {
      std::string where = " (callers";
      for (int caller : call.callers) where += ' ' + std::to_string(caller);
      where += ", root " + std::to_string(call.root) + ", " + DTypeName(call.dtype) + " [" +
               std::to_string(call.rows) + "," + std::to_string(call.row_elements) + "], " +
               std::to_string(running->output.size()) + " bytes)";
      Violation(name + " ended OK with a wrong result" + where);
    }
    if (call.kind == CollectiveKind::kAddSet) {
      rank->set_ids[call.group] = static_cast<uint32_t>(running->answer.number);
    }
  } else {
    ++result_.failed;
    if (!may_fail_) Violation(name + " failed although nothing was wrong: " + status.message());
    // A group whose registration was refused has no number for the gate to count by.
    const bool mismatch =
        (status.code() == Code::kFailedPrecondition ||
         (status.code() == Code::kInvalidArgument && config_.atomic_steps != 0)) &&
        rank->failure.ok();
    if (status.code() == Code::kInternal) Violation(name + ": " + status.message());
    if (!mismatch) {
      EndProgram(rank);
      return;
    }
  }
  std::map<std::string, int64_t> last_us;  // by key: those of one keep their order
  for (const Call& next : std::exchange(rank->after[call.place], {})) {
    int64_t& at_us = last_us[next.key];
    at_us = std::max(at_us, queue_.now_us() + rng_.Between(0, 100));
    SubmitAt(rank, at_us, next);
  }
  if (--rank->open == 0 && !rank->finished) EndPhase(rank);
}

// As tfdist.shutdown() does.
void EngineWorld::EndProgram(Rank* rank) {
  if (rank->finished) return;
  rank->finished = true;
  if (rank->failure.ok()) {
    if (!rank->running.empty()) {
      Violation("rank " + std::to_string(rank->rank) + " came to its end with open operations");
    }
  }
  OnRank(rank->rank, queue_.now_us() + rng_.Between(0, rng_.Chance(60) ? 50 : 20 * kMs),
         [this](Rank* own) {
           own->leave_by_us = queue_.now_us() + kLeaveUs;
           own->commands.push_back([this](Engine* engine) { engine->Leave(queue_.now_us()); });
           WakeRank(own->rank);
         });
}

// ---- the end ----

// Whatever happened, a rank that leaves holds nothing of anybody.
void EngineWorld::CheckLinks(const Rank& rank) {
  const std::string name = "rank " + std::to_string(rank.rank);
  for (const auto& link : rank.engine->links()) {
    const auto* own = static_cast<const SimLink*>(link.get());
    if (own == nullptr) continue;
    if (!own->misuse().empty()) Violation(name + ": " + own->misuse());
    if (own->held() <= rank.engine->stashed()) continue;  // judged below
    Violation(name + " holds frames of rank " + std::to_string(own->peer()) + " at its end");
  }
  if (rank.engine->busy()) Violation(name + " leaves with work in progress");
  // A rank that left out a call has frames for it.
  if (rank.engine->stashed() > 0 && (!rank.failure.ok() || !may_fail_)) {
    Violation(name + " keeps frames that nothing waits for");
  }
}

EngineResult EngineWorld::Run() {
  // The last operation can be submitted while a fault lasts; a call that is left out is noticed
  // after its timeout.
  queue_.RunUntil(fault_us_ + 2 * kTimeoutUs + kGraceUs + kAgreeUs + kLeaveUs + 2 * kSecond);
  if (result_.violation.empty()) CheckEnd();
  return std::move(result_);
}

void EngineWorld::CheckEnd() {
  int64_t last_us = -1;
  std::set<int> culprits;
  for (const auto& own : ranks_) {
    if (own->state != State::kRuns) continue;
    const std::string name = "rank " + std::to_string(own->rank);
    if (!own->running.empty()) {
      Violation(name + " still waits for \"" + own->running.begin()->second->call.key + "\"");
    }
    if (!own->finished) Violation(name + " did not come to the end of its program");
    if (!own->left) Violation(name + " did not leave");
    if (!own->completions.empty()) Violation(name + " has callbacks that never ran");
    if (!may_fail_ && !own->failure.ok()) {
      Violation(name + " failed although nothing was wrong: " + own->failure.message());
    }
    if (own->failed_us < 0) continue;
    last_us = std::max(last_us, own->failed_us);
    result_.deadlock |= own->failure.message().find("Deadlock") != std::string::npos;
    const std::string& record = own->failure.payload();
    const size_t at = record.find("\"rank\": ");
    if (at != std::string::npos) culprits.insert(std::atoi(record.c_str() + at + 8));
  }
  result_.culprits_differ = culprits.size() > 1;
  CheckVerdict();
  if (result_.fault == "kill" && death_us_ >= 0 && last_us >= death_us_) {
    result_.detection_us = last_us - death_us_;
  }
  Digest(static_cast<uint64_t>(result_.operations));
}

// Who decided, says the same; behind the gate it has applied the same steps, and whole ones.
void EngineWorld::CheckVerdict() {
  const Rank* first = nullptr;
  for (const auto& own : ranks_) {
    if (own->outcome != Outcome::kDecided || own->state == State::kDead) continue;
    if (first == nullptr) first = own.get();
    const std::string names =
        "ranks " + std::to_string(first->rank) + " and " + std::to_string(own->rank);
    if (own->failure.message() != first->failure.message() ||
        own->failure.payload() != first->failure.payload()) {
      Violation(names + " raise differently: " + first->failure.message() + " | " +
                own->failure.message());
    }
    if (config_.atomic_steps == 0) continue;
    for (const auto& [group, buckets] : own->applied) {
      // Buckets in which a rank takes part after it has joined are not seen here.
      if (Joins(*own, group) || Joins(*first, group)) continue;
      const int steps = buckets.begin()->second;
      for (const auto& [bucket, count] : buckets) {
        if (count == steps) continue;
        Violation("rank " + std::to_string(own->rank) + " has a torn step of " + group);
      }
      const auto other = first->applied.find(group);
      if (other != first->applied.end() && other->second.begin()->second != steps) {
        Violation(names + " have applied different steps of " + group);
      }
    }
  }
}

void EngineWorld::Violation(const std::string& text) {
  Trace("VIOLATION " + text);
  if (result_.violation.empty()) result_.violation = text;
}

void EngineWorld::Trace(const std::string& text) {
  if (!tracing_) return;
  char time[32];
  std::snprintf(time, sizeof(time), "%10.6f  ", static_cast<double>(queue_.now_us()) / 1e6);
  result_.trace.push_back(time + text);
}

}  // namespace tfdist::sim
