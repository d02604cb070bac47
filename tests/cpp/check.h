// A test harness in one header, so that a user needs a compiler and nothing else. Included once a program: it has main.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};
inline std::vector<Test> tests;
inline std::vector<std::string> givens;
inline int failures = 0;  // of the running test; checks belong on the main thread

inline bool add(const char* name, void (*body)()) { return tests.push_back({name, body}), true; }

/// Describes the checks of a scope; printed when one fails.
class Given {
 public:
  explicit Given(std::string text) { givens.push_back(std::move(text)); }
  ~Given() { givens.pop_back(); }
};

inline void fail(const char* file, int line, const std::string& message) {
  if (++failures > 5) return;  // an exhaustive test would fill the screen
  std::printf("%s:%d: %s", file, line, message.c_str());
  for (const std::string& given : givens) std::printf(" [%s]", given.c_str());
  std::printf("\n");
}

template <class A, class B>
void equal(const A& a, const B& b, const char* claim, const char* file, int line) {
  if (a == b) return;
  std::ostringstream text;
  text.precision(17);
  const auto show = [&](const auto& v) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(v)>>)
      text << +v;  // characters as numbers
    else
      text << v;
  };
  text << claim << ": ", show(a), text << " against ", show(b);
  fail(file, line, text.str());
}

}  // namespace check

#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition))
#define CHECK_EQ(a, b) check::equal(a, b, #a " == " #b, __FILE__, __LINE__)
#define TEST(name)                                             \
  static void name();                                          \
  static const bool name##_is_known = check::add(#name, name); \
  static void name()

/// Runs the tests whose names contain the first argument; all of them without one.
int main(int argc, char** argv) {
  int failed = 0, ran = 0;
  for (const check::Test& test : check::tests) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    check::failures = 0, ++ran;
    const auto start = std::chrono::steady_clock::now();
    test.body();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%s %s (%.2f s)\n", check::failures ? "FAILED" : "ok    ", test.name, seconds.count());
    if (check::failures) std::printf("       %d checks failed\n", check::failures), ++failed;
  }
  std::printf("%d of %d tests failed\n", failed, ran);
  return failed || !ran;
}
