// A small coverage-guided fuzzer for compilers without libFuzzer.
//
//   fuzz_wire [-seconds=N] [-runs=N] [-seed=N] [-crash=FILE] [-keep=FOLDER] [FILE or FOLDER...]
//
// Starts from the target's seeds and the given files, changes one at a time, and keeps what reaches
// code that nothing reached before (where the target is compiled with -fsanitize-coverage=trace-pc;
// elsewhere every input is a change of a seed). The last input is written to the crash file before
// it runs, so that it is there when the process ends; the same file as an argument runs it again.
// Inputs found to reach something new are saved in the folder of -keep.
// The same seed and number of runs do the same everywhere.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz.h"

namespace {

constexpr size_t kMapBits = 16;
std::array<uint8_t, size_t{1} << kMapBits> reached;       // by the input at hand
std::array<uint8_t, size_t{1} << kMapBits> reached_ever;  // by any
uintptr_t previous_place = 0;

}  // namespace

// Called by the compiler's instrumentation at every branch: counts pairs of places.
extern "C" __attribute__((no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const uintptr_t mixed = (place ^ place >> 13) * 0x9E3779B1u;
  reached[(mixed ^ previous_place) & (reached.size() - 1)] = 1;
  previous_place = mixed >> 1;
}

namespace tfdist::fuzz {
namespace {

constexpr size_t kMostBytes = 4096;
constexpr size_t kMostKept = 4096;

struct Options {
  double seconds = 0;  // of processor time; 0: no limit
  uint64_t runs = 0;   // 0: no limit
  uint32_t seed = 1;
  std::string crash;
  std::string keep;
  std::vector<std::string> paths;
};

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options) : options_(options), random_(options.seed) {}

  int Run() {
    std::vector<std::string> inputs = Seeds();
    for (const std::string& path : options_.paths) {
      if (!std::filesystem::is_directory(path)) {
        inputs.push_back(ReadFile(path));
        continue;
      }
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        if (entry.is_regular_file()) inputs.push_back(ReadFile(entry.path()));
      }
    }
    inputs.push_back("");
    for (const std::string& input : inputs) {
      Execute(input);
      kept_.push_back(input);
    }
    while ((options_.runs == 0 || runs_ < options_.runs) && !TimeIsUp()) {
      const std::string input = Mutated(kept_[random_() % kept_.size()]);
      if (!Execute(input) || kept_.size() >= kMostKept) continue;
      kept_.push_back(input);
      if (options_.keep.empty()) continue;
      const std::string name = std::to_string(std::hash<std::string>()(input));
      Save(input, options_.keep + "/" + name);
    }
    const auto edges = std::count(reached_ever.begin(), reached_ever.end(), 1);
    std::printf("%llu runs, %.1f s of processor time, %zu inputs kept, %lld branches, 0 crashes\n",
                static_cast<unsigned long long>(runs_), CpuSeconds(), kept_.size(),
                static_cast<long long>(edges));
    return 0;
  }

 private:
  bool TimeIsUp() {
    // The clock costs more than a run.
    if (options_.seconds <= 0 || runs_ % 64 != 0) return false;
    return CpuSeconds() >= options_.seconds;
  }

  // True when it reached something new.
  bool Execute(const std::string& input) {
    ++runs_;
    if (!options_.crash.empty()) Save(input, options_.crash);
    reached.fill(0);
    previous_place = 0;
    // A buffer of exactly this size: a read past its end is a sanitizer's to find.
    const std::vector<uint8_t> exact(input.begin(), input.end());
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
    bool fresh = false;
    for (size_t i = 0; i < reached.size(); ++i) {
      if (reached[i] == 0 || reached_ever[i] != 0) continue;
      reached_ever[i] = 1;
      fresh = true;
    }
    return fresh;
  }

  static void Save(const std::string& input, const std::string& path) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(input.data(), static_cast<std::streamsize>(input.size()));
  }

  std::string Mutated(std::string text) {
    for (uint32_t count = 1 + random_() % 5; count > 0; --count) MutateOnce(&text);
    if (text.size() > kMostBytes) text.resize(kMostBytes);
    return text;
  }

  void MutateOnce(std::string* text) {
    const size_t at = text->empty() ? 0 : random_() % text->size();
    switch (text->empty() ? 4 : random_() % 9) {
      case 0:
        (*text)[at] = static_cast<char>((*text)[at] ^ 1 << random_() % 8);
        break;
      case 1:
        (*text)[at] = static_cast<char>(random_());
        break;
      case 2:  // a number, mostly one at the edge of something: lengths, counts, ids
        Overwrite(text, at, Edge(text->size() - at));
        break;
      case 3:
        text->erase(at, 1 + random_() % 16);
        break;
      case 4: {
        std::string more(1 + random_() % 16, '\0');
        if (random_() % 2 == 0) {
          for (char& c : more) c = static_cast<char>(random_());
        }
        text->insert(at, more);
        break;
      }
      case 5:  // a part of it twice
        text->insert(at, text->substr(random_() % text->size(), 1 + random_() % 64));
        break;
      case 6: {  // a part of another input
        const std::string& other = kept_[random_() % kept_.size()];
        if (other.empty()) break;
        const std::string part = other.substr(random_() % other.size(), 1 + random_() % 128);
        text->replace(at, random_() % 2 == 0 ? part.size() : 0, part);
        break;
      }
      case 7:
        text->resize(at);
        break;
      default:  // a number next to the one that is there
        (*text)[at] = static_cast<char>((*text)[at] + (random_() % 2 == 0 ? 1 : -1));
    }
  }

  // `left`: bytes from here to the end, the value of a length that just fits.
  uint64_t Edge(size_t left) {
    const uint64_t edges[] = {0,
                              1,
                              left,
                              left - 4,
                              left - 3,
                              0x7f,
                              0x80,
                              0xff,
                              0x7fff,
                              0xffff,
                              480,
                              481,
                              4096,
                              4097,
                              0x7fffffff,
                              0x80000000,
                              0xffffffff,
                              ~uint64_t{0},
                              uint64_t{1} << 63,
                              uint64_t{1} << 62,
                              0x3ff0000000000000};
    return edges[random_() % std::size(edges)] + (random_() % 4 == 0 ? 1 : 0);
  }

  void Overwrite(std::string* text, size_t at, uint64_t value) {
    const size_t width = size_t{1} << random_() % 4;
    const size_t n = std::min(width, text->size() - at);
    std::memcpy(text->data() + at, &value, n);
  }

  const Options options_;
  std::mt19937 random_;
  std::vector<std::string> kept_;
  uint64_t runs_ = 0;
};

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (name == "-seconds") {
      options.seconds = std::stod(value);
    } else if (name == "-runs") {
      options.runs = std::stoull(value);
    } else if (name == "-seed") {
      options.seed = static_cast<uint32_t>(std::stoul(value));
    } else if (name == "-crash") {
      options.crash = value;
    } else if (name == "-keep") {
      options.keep = value;
    } else if (std::filesystem::exists(argument)) {
      options.paths.push_back(argument);
    } else {
      std::fprintf(stderr, "unknown argument or missing file: %s\n", argv[i]);
      return 2;
    }
  }
  if (options.seconds <= 0 && options.runs == 0) options.runs = 1;  // the given inputs only
  return Fuzzer(options).Run();
}

}  // namespace
}  // namespace tfdist::fuzz

int main(int argc, char** argv) { return tfdist::fuzz::Main(argc, argv); }
