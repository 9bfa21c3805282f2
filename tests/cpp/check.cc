#include "check.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

namespace check {
namespace {

struct Test {
  const char* name;
  void (*body)();
};

std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

}  // namespace

bool& Full() {
  static bool full = false;
  return full;
}

Register::Register(const char* name, void (*body)()) { Tests().push_back({name, body}); }

void Fail(const char* file, int line, std::string_view what) {
  const char* slash = std::strrchr(file, '/');
  throw Failure(std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line) +
                ": " + std::string(what));
}

std::string TextOf(std::string_view value) { return std::string(value); }
std::string TextOf(const void* value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", value);
  return text;
}
std::string TextOf(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}
std::string TextOf(long long value) { return std::to_string(value); }
std::string TextOf(unsigned long long value) { return std::to_string(value); }

void FailEqual(const std::string& a, const std::string& b, const Comparison& where) {
  std::string what = std::string(where.text_a) + " == " + where.text_b + ": " + a + " != " + b;
  if (!where.context.empty()) what += " (" + std::string(where.context) + ")";
  Fail(where.file, where.line, what);
}

void FailOk(const char* text, const std::string& message, const char* file, int line) {
  Fail(file, line, text + (": " + message));
}

int Main(int argc, char** argv) {
  int failed = 0;
  int run = 0;
  const char* part = "";
  bool stop_early = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "-x") == 0) {
      stop_early = true;
    } else if (std::strcmp(argv[i], "--full") == 0) {
      Full() = true;
    } else {
      part = argv[i];
    }
  }
  for (const Test& test : Tests()) {
    if (std::strstr(test.name, part) == nullptr) continue;
    if (stop_early && failed > 0) break;
    const auto begin = std::chrono::steady_clock::now();
    std::string error;
    try {
      test.body();
    } catch (const std::exception& e) {
      error = e.what();
    }
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    ++run;
    if (!error.empty()) ++failed;
    std::printf("%s %s (%.0f ms)%s%s\n", error.empty() ? "ok    " : "FAILED", test.name, ms,
                error.empty() ? "" : "\n       ", error.c_str());
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", run - failed, failed);
  return failed == 0 && run > 0 ? 0 : 1;
}

}  // namespace check
