// Files to read from, which are not on a disk, and the file descriptors that are open.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <span>
#include <vector>

#include "check.hpp"
#include "crc32.hpp"
#include "unique_fd.hpp"

namespace changeover::stress {

// Files of different seeds differ.
class File {
 public:
  explicit File(std::uint64_t nbytes, std::uint32_t seed = 1)
      : bytes(nbytes), fd(::memfd_create("file", MFD_CLOEXEC)) {
    std::uint32_t word = seed;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>((word = word * 1664525 + 1013904223) >> 24);
    CHECK(::write(fd.borrow(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }

  std::uint32_t crc(std::uint64_t offset, std::uint64_t nbytes) const {
    return crc32(std::span(bytes).subspan(offset, nbytes));
  }

  std::vector<std::byte> bytes;
  UniqueFd fd;
};

inline std::size_t open_fds() {
  const std::filesystem::directory_iterator fds("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(fds), end(fds)));
}

}  // namespace changeover::stress
