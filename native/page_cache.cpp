#include "page_cache.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <optional>

namespace changeover {
namespace {

constexpr std::uint64_t kPageBytes = 4096;  // the smallest there are: with larger ones the answer is "no" at worst

// Linux 6.5, linux/mman.h; missing from the headers of some supported systems.
constexpr long kCachestat = 451;
struct CachestatRange {
  std::uint64_t offset;
  std::uint64_t nbytes;
};
struct Cachestat {
  std::uint64_t cached_pages;
  std::uint64_t dirty_pages;
  std::uint64_t writeback_pages;
  std::uint64_t evicted_pages;
  std::uint64_t recently_evicted_pages;
};

std::optional<std::uint64_t> cached_pages(int fd, std::uint64_t offset, std::uint64_t nbytes) noexcept {
  CachestatRange range{offset, nbytes};
  Cachestat found{};
  if (::syscall(kCachestat, fd, &range, &found, 0) != 0) return std::nullopt;
  return found.cached_pages;
}

bool must_wait(int fd, std::uint64_t offset) noexcept {
  std::byte byte;
  const iovec to{&byte, 1};
  return ::preadv2(fd, &to, 1, static_cast<off_t>(offset), RWF_NOWAIT) < 0 && errno == EAGAIN;
}

}  // namespace

bool lives_in_memory(int borrow_fd) noexcept {
  struct statfs facts {};
  if (::fstatfs(borrow_fd, &facts) != 0) return false;
  const auto type = static_cast<unsigned long>(facts.f_type);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

bool is_cached(int borrow_fd, std::uint64_t offset, std::uint64_t nbytes) noexcept {
  if (nbytes == 0) return true;
  const std::uint64_t pages = (offset + nbytes - 1) / kPageBytes - offset / kPageBytes + 1;
  if (const auto cached = cached_pages(borrow_fd, offset, nbytes)) return *cached >= pages;
  // Not at the ends: to the kernel's readahead that would look like a sequential read.
  return !must_wait(borrow_fd, offset + nbytes / 4) && !must_wait(borrow_fd, offset + nbytes / 4 * 3);
}

void drop_cached(int borrow_fd, std::uint64_t offset, std::uint64_t nbytes) noexcept {
  static_cast<void>(
      ::posix_fadvise(borrow_fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes), POSIX_FADV_DONTNEED));
}

}  // namespace changeover
