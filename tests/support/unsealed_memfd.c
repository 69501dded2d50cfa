/* Preloaded into a daemon of a test: write seals are promised and not made, so that the test can damage
   memory that weights are served from, as a failing device would. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define WRITE_SEALS (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)

static int forward(const char* name, int fd, int command, long argument) {
  int (*next)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
  if (command == F_ADD_SEALS) argument &= ~(long)WRITE_SEALS;
  const int result = next(fd, command, argument);
  return command == F_GET_SEALS && result >= 0 ? result | F_SEAL_WRITE : result;
}

#define FORWARD(name)                        \
  int name(int fd, int command, ...) {       \
    va_list arguments;                       \
    va_start(arguments, command);            \
    const long argument = va_arg(arguments, long); \
    va_end(arguments);                       \
    return forward(#name, fd, command, argument); \
  }

FORWARD(fcntl)
FORWARD(fcntl64)
