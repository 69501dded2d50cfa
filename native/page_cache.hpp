// What the kernel's page cache holds of a file.
#pragma once

#include <cstdint>

namespace changeover {

// Whether a file is in memory and nowhere else (tmpfs and its like): to ask for its pages, one by one as they
// are, would take a twentieth of the time of reading them.
bool lives_in_memory(int borrow_fd) noexcept;

// Whether all these bytes can be read without the disk.  Asks cachestat (Linux 6.5; newer ones let only
// those ask who could write to the file), else tries a byte of two pages without waiting.  A hint: pages
// come and go.  True where the kernel says neither: what is cached is then not read from the disk once more.
bool is_cached(int borrow_fd, std::uint64_t offset, std::uint64_t nbytes) noexcept;

// Let go of pages that were read only to pass through.  A hint.
void drop_cached(int borrow_fd, std::uint64_t offset, std::uint64_t nbytes) noexcept;

}  // namespace changeover
