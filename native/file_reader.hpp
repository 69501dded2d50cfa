// Reading part of a file into memory, checksummed while the bytes are in cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

// Fill `destination` from `borrow_fd` at `file_offset`; answer the CRC32 of what was read.  Retries
// short reads and EINTR.  Throws SystemError; with number 0 where the file ends early.
std::uint32_t read_file(int borrow_fd, std::uint64_t file_offset, std::span<std::byte> destination);

}  // namespace changeover
