#include "memfd_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "error.hpp"

// Linux 6.1; missing from the C library's headers of some supported systems.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace changeover {
namespace {

constexpr std::uint64_t kSmallPageBytes = 4096;
constexpr std::uint64_t kStepBytes = std::uint64_t{16} << 20;

// In steps: a call that a signal interrupts gives back all it had, so that a long one might never
// end in a process with a periodic timer.
void allocate(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  while (nbytes > 0) {
    const std::uint64_t step = std::min(kStepBytes, nbytes);
    if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(step)) == 0) {
      offset += step;
      nbytes -= step;
    } else if (errno != EINTR) {
      throw SystemError("fallocate", errno);
    }
  }
}

bool collapse(std::span<const std::byte> range) {
  return ::madvise(const_cast<std::byte*>(range.data()), range.size(), MADV_COLLAPSE) == 0;
}

}  // namespace

void take_pages(const Mapping& mapping, int borrow_memfd, std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t start = (offset + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const std::uint64_t end = (offset + nbytes) / kHugePageBytes * kHugePageBytes;
  if (start < end) {
    // Where there is nothing at all, the kernel collapses nothing.
    for (std::uint64_t at = start; at < end; at += kHugePageBytes) allocate(borrow_memfd, at, kSmallPageBytes);
    if (collapse(mapping.range(start, end - start)) && start == offset && end == offset + nbytes) return;
  }
  // Also where the kernel says that it did: a page that is there already costs next to nothing.
  allocate(borrow_memfd, offset, nbytes);
}

}  // namespace changeover
