// A test executable: TEST(name) { CHECK(...); } ... and TEST_MAIN(). Runs every test, or those
// whose name contains argv[1]; prints one line each and exits with 1 when any failed. With --full,
// products are gone through of which Full() has a sample otherwise.
#ifndef TFDIST_TESTS_CPP_CHECK_H_
#define TFDIST_TESTS_CPP_CHECK_H_

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace check {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

bool& Full();

struct Register {
  Register(const char* name, void (*body)());
};

[[noreturn]] void Fail(const char* file, int line, std::string_view what);

// A value as a failure shows it.
std::string TextOf(std::string_view value);
std::string TextOf(const void* value);
std::string TextOf(double value);
std::string TextOf(long long value);
std::string TextOf(unsigned long long value);

template <typename T>
std::string Text(const T& value) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    return TextOf(std::string_view(value));
  } else if constexpr (std::is_convertible_v<const T&, const void*>) {
    return TextOf(static_cast<const void*>(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    return TextOf(static_cast<double>(value));
  } else if constexpr (std::is_signed_v<T>) {
    return TextOf(static_cast<long long>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return TextOf(static_cast<unsigned long long>(value));
  } else {  // complex
    return "(" + TextOf(static_cast<double>(value.real())) + "," +
           TextOf(static_cast<double>(value.imag())) + ")";
  }
}

// A comparison in the source, and what it is about.
struct Comparison {
  const char* text_a;
  const char* text_b;
  const char* file;
  int line;
  std::string_view context;
};

[[noreturn]] void FailEqual(const std::string& a, const std::string& b, const Comparison& where);

template <typename A, typename B>
void Equal(const A& a, const B& b, const Comparison& where) {
  if (!(a == b)) FailEqual(Text(a), Text(b), where);
}

[[noreturn]] void FailOk(const char* text, const std::string& message, const char* file, int line);

template <typename Status>
void Ok(const Status& status, const char* text, const char* file, int line) {
  if (!status.ok()) FailOk(text, status.message(), file, line);
}

int Main(int argc, char** argv);

}  // namespace check

#define TEST(name)                                                   \
  static void Test_##name();                                         \
  static const check::Register register_##name(#name, &Test_##name); \
  static void Test_##name()
#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) check::Fail(__FILE__, __LINE__, "CHECK " #condition); \
  } while (false)
#define CHECK_EQ(a, b) check::Equal((a), (b), {#a, #b, __FILE__, __LINE__, ""})
#define CHECK_EQ_IN(a, b, context) check::Equal((a), (b), {#a, #b, __FILE__, __LINE__, (context)})
#define CHECK_OK(expr) check::Ok((expr), #expr, __FILE__, __LINE__)
#define TEST_MAIN() \
  int main(int argc, char** argv) { return check::Main(argc, argv); }

#endif  // TFDIST_TESTS_CPP_CHECK_H_
