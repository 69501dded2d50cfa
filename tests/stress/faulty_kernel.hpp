// System calls that fail on demand; the linker puts them before the real ones (--wrap).
#pragma once

#include <functional>
#include <sys/types.h>

namespace changeover::stress {

// Called instead of the system call where set; answers its result and sets errno.
using Pread = std::function<ssize_t(int fd, void* to, std::size_t nbytes, off_t offset)>;
using Open = std::function<int(const char* path, int flags)>;
using Fallocate = std::function<int(int fd, int mode, off_t offset, off_t nbytes)>;

extern Pread fake_pread;
extern Open fake_open;
extern Fallocate fake_fallocate;

ssize_t real_pread(int fd, void* to, std::size_t nbytes, off_t offset);
int real_open(const char* path, int flags);
int real_fallocate(int fd, int mode, off_t offset, off_t nbytes);

}  // namespace changeover::stress
