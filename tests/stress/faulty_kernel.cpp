#include "faulty_kernel.hpp"

extern "C" {
ssize_t __real_pread(int fd, void* to, std::size_t nbytes, off_t offset);
int __real_open(const char* path, int flags, ...);
int __real_fallocate(int fd, int mode, off_t offset, off_t nbytes);

// The core creates no file, so there is no mode.
int __wrap_open(const char* path, int flags, ...) {
  using namespace changeover::stress;
  return fake_open ? fake_open(path, flags) : __real_open(path, flags);
}

ssize_t __wrap_pread(int fd, void* to, std::size_t nbytes, off_t offset) {
  using namespace changeover::stress;
  return fake_pread ? fake_pread(fd, to, nbytes, offset) : __real_pread(fd, to, nbytes, offset);
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t nbytes) {
  using namespace changeover::stress;
  return fake_fallocate ? fake_fallocate(fd, mode, offset, nbytes)
                        : __real_fallocate(fd, mode, offset, nbytes);
}
}

namespace changeover::stress {

Pread fake_pread;
Open fake_open;
Fallocate fake_fallocate;

ssize_t real_pread(int fd, void* to, std::size_t nbytes, off_t offset) {
  return __real_pread(fd, to, nbytes, offset);
}

int real_open(const char* path, int flags) { return __real_open(path, flags); }

int real_fallocate(int fd, int mode, off_t offset, off_t nbytes) {
  return __real_fallocate(fd, mode, offset, nbytes);
}

}  // namespace changeover::stress
