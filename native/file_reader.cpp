#include "file_reader.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>

#include "crc32.hpp"
#include "error.hpp"

namespace changeover {
namespace {

// Small enough for the level 2 cache of the core that reads, so that the checksum finds the bytes
// there; large enough that the system call does not count.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

void read_exactly(int fd, std::uint64_t file_offset, std::span<std::byte> chunk) {
  while (!chunk.empty()) {
    const ssize_t got = ::pread(fd, chunk.data(), chunk.size(), static_cast<off_t>(file_offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      throw SystemError("pread", errno);
    }
    if (got == 0) {
      throw SystemError("pread", 0,
                        "the file ends at byte " + std::to_string(file_offset) + ", at least " +
                            std::to_string(chunk.size()) + " more were expected");
    }
    file_offset += static_cast<std::uint64_t>(got);
    chunk = chunk.subspan(static_cast<std::size_t>(got));
  }
}

}  // namespace

std::uint32_t read_file(int borrow_fd, std::uint64_t file_offset, std::span<std::byte> destination) {
  constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (file_offset > kLargestOffset || destination.size() > kLargestOffset - file_offset) {
    throw Misuse("a file has no byte " + std::to_string(file_offset) + " + " +
                 std::to_string(destination.size()));
  }
  std::uint32_t crc = 0;
  while (!destination.empty()) {
    const auto chunk = destination.first(std::min(kChunkBytes, destination.size()));
    read_exactly(borrow_fd, file_offset, chunk);
    crc = crc32(chunk, crc);
    file_offset += chunk.size();
    destination = destination.subspan(chunk.size());
  }
  return crc;
}

}  // namespace changeover
