// A test executable: TEST(name) { CHECK(...); } ... and TEST_MAIN(). Runs every test, or those
// whose name contains argv[1]; prints one line each and exits with 1 when any failed. With --full,
// products are gone through of which Full() has a sample otherwise.
#ifndef TFDIST_TESTS_CPP_CHECK_H_
#define TFDIST_TESTS_CPP_CHECK_H_

#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline bool& Full() {
  static bool full = false;
  return full;
}

struct Register {
  Register(const char* name, void (*body)()) { Tests().push_back({name, body}); }
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  const char* slash = std::strrchr(file, '/');
  std::ostringstream out;
  out << (slash != nullptr ? slash + 1 : file) << ":" << line << ": " << what;
  throw Failure(out.str());
}

template <typename A, typename B>
void Equal(const A& a, const B& b, const char* text_a, const char* text_b, const char* file,
           int line, const std::string& context) {
  if (a == b) return;
  std::ostringstream out;
  out << text_a << " == " << text_b << ": " << a << " != " << b;
  if (!context.empty()) out << " (" << context << ")";
  Fail(file, line, out.str());
}

inline int Main(int argc, char** argv) {
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

#define TEST(name)                                                   \
  static void Test_##name();                                         \
  static const check::Register register_##name(#name, &Test_##name); \
  static void Test_##name()
#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) check::Fail(__FILE__, __LINE__, "CHECK " #condition); \
  } while (false)
#define CHECK_EQ(a, b) check::Equal((a), (b), #a, #b, __FILE__, __LINE__, "")
#define CHECK_EQ_IN(a, b, context) check::Equal((a), (b), #a, #b, __FILE__, __LINE__, (context))
#define CHECK_OK(expr)                                                       \
  do {                                                                       \
    const auto& check_status_ = (expr);                                      \
    if (!check_status_.ok())                                                 \
      check::Fail(__FILE__, __LINE__, #expr ": " + check_status_.message()); \
  } while (false)
#define TEST_MAIN() \
  int main(int argc, char** argv) { return check::Main(argc, argv); }

#endif  // TFDIST_TESTS_CPP_CHECK_H_
