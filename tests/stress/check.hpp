// `CHECK`: end the program, saying what did not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace changeover::stress {

// How a test program says that it found a violation, as opposed to a sanitizer or a crash.
inline constexpr int kViolationExit = 3;

[[noreturn]] inline void violation(const char* what, const char* file, int line) {
  std::fprintf(stderr, "violation: %s (%s:%d)\n", what, file, line);
  std::fflush(stderr);
  std::_Exit(kViolationExit);
}

}  // namespace changeover::stress

#define CHECK(condition) \
  ((condition) ? static_cast<void>(0) : changeover::stress::violation(#condition, __FILE__, __LINE__))

#define CHECK_THROWS(expression, type)                                           \
  do {                                                                           \
    bool has_thrown = false;                                                     \
    try {                                                                        \
      static_cast<void>(expression);                                             \
    } catch (const type&) {                                                      \
      has_thrown = true;                                                         \
    }                                                                            \
    if (!has_thrown) changeover::stress::violation(#expression " throws " #type, __FILE__, __LINE__); \
  } while (false)
