// Programs of simulated ranks: phases of operations, the same on all ranks, and the values that go
// in and must come out. Values without an engine.
#ifndef TFDIST_TESTS_SIM_ENGINE_PROGRAM_H_
#define TFDIST_TESTS_SIM_ENGINE_PROGRAM_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "clock.h"
#include "collective/schedule.h"

namespace tfdist::sim {

// One collective as its ranks call it.
struct Call {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::string key;
  std::string set;           // name of a process set of the program, empty: the world
  std::vector<int> members;  // of its set
  std::vector<int> callers;  // who calls it: all but those that have joined the set
  int number = 0;            // tells its values from those of other calls
  std::string group;         // of a bucket, kRegister; kAddSet: name of the set
  std::vector<int> added;    // kAddSet: its ranks
  int bucket = 0;
  int buckets = 0;
  DType dtype = DType::kFloat32;
  int64_t rows = 1;  // of a rank without an own number
  int64_t row_elements = 1;
  bool ragged = false;   // a rank's rows differ
  bool average = false;  // kAllreduce: over the callers
  bool repeats = false;  // kAllreduce: RequestInfo::repeats of its callers,
  int silent = -1;       // but for this rank
  int root = 0;
  int peer = -1;
  int place = 0;  // in its phase
};

struct Phase {
  // Each rank makes those that it is a member of, in any order; it may make one only when another
  // one with a smaller place has ended, so that what ranks wait for never goes round in a circle.
  std::vector<Call> calls;
};

// The ranks of a process set run out of data at different moments. Each calls it once, and goes on
// with phase `end` only when it has ended.
struct Join {
  Call call;
  std::map<int, size_t> from;  // rank → the first phase without it
  size_t end = 0;
  int latest = 0;    // the lowest of those that call everything
  int complete = 0;  // how many these are
  // How often each bucket of a group of the set is called before phase `end`.
  std::map<std::string, std::map<int, int>> steps;
};

struct Program {
  std::vector<Phase> phases;
  size_t first_step = 0;  // the phase
  std::vector<Join> joins;
};

// A program of a training: registrations, process sets, steps.
Program MakeProgram(int size, Rng* rng);
// Lets ranks run out of data; some steps overlap, buckets change their shape, groups come late.
void AddJoins(Program* program, Rng* rng);

// Rows of `rank`'s input, the shape, the values as bytes.
int64_t InputRows(const Call& call, int rank);
std::vector<uint8_t> Input(const Call& call, int rank);
// The bytes that `rank` must find in its output.
std::vector<uint8_t> Expected(const Call& call, int rank);

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_ENGINE_PROGRAM_H_
