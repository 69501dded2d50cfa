// `HostStaging`: the way of file bytes into host memory.
//
// What is cached is read straight into its place.  Direct I/O wants whole blocks at aligned addresses, so
// what is cold comes through a few buffers of the reading thread; a copy is far faster than a disk.
#pragma once

#include <cstdint>
#include <span>

#include "extent_reader.hpp"

namespace changeover::host_staging {

// Read from `borrow_fd` at `file_offset` into `pieces` of `memory`, whose pages exist.  As ExtentReader.
void read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces, std::span<std::byte> memory);

}  // namespace changeover::host_staging
