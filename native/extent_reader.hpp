// `ExtentReader`: consecutive bytes of a file to where they belong, through slots.
//
// What is in the page cache is read from there.  The rest is read with direct I/O, several slots ahead,
// so that it neither goes through the page cache nor pushes out what others have in it; where a filesystem
// has no direct I/O it is read as usual and let go of afterwards.  Checksums are computed while the bytes
// are in the processor's cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "read_queue.hpp"

namespace changeover {

// Whole blocks of this many bytes, at addresses that are multiples of it, suit the direct I/O of all
// common disks.
inline constexpr std::uint64_t kDirectAlignment = 4096;

// Of a slot, beside what a chunk takes: direct I/O reads whole blocks at both ends.
inline constexpr std::uint64_t kSlotMarginBytes = 2 * kDirectAlignment;

// Buffers that are filled in turn, and the way of their bytes to their place.
class Slots {
 public:
  virtual ~Slots() = default;
  virtual unsigned count() const noexcept = 0;
  // What goes into one slot; it has kSlotMarginBytes more.
  virtual std::uint64_t chunk_bytes() const noexcept = 0;
  // Whether nobody reads what was placed from it any more.
  virtual bool is_free(unsigned slot) const noexcept = 0;
  // Wait for a moment: none is free.
  virtual void wait_a_moment() = 0;
  // The memory of a free slot, to be filled; aligned to kDirectAlignment.
  virtual std::span<std::byte> reuse(unsigned slot) = 0;
  // The destination's own memory, where the processor can read files into it; else nothing.
  virtual std::span<std::byte> in_place(std::uint64_t offset, std::uint64_t nbytes) = 0;
  // Begin to bring `bytes` of the slot to `offset` of the destination.
  virtual void place(unsigned slot, std::span<const std::byte> bytes, std::uint64_t offset) = 0;
};

// Bytes of the file that lie together in the destination.
struct Piece {
  std::uint64_t offset;  // in the destination
  std::uint64_t nbytes;
  std::uint32_t crc = 0;  // of what was read; set by `read`
};

// Not thread-safe: each thread that reads has its own.
class ExtentReader {
 public:
  // The queue has room for a read per slot.
  ExtentReader(ReadQueue& queue, Slots& slots);

  // Read the bytes from `file_offset` on into `pieces`, one after the other.  Throws ReadError, with number
  // 0 where the file ends early; then pieces are partly read.
  void read(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces);

 private:
  struct Chunk;
  class Source;
  class PieceWalk;

  void start(Source& source, Chunk& chunk);
  void finish(Source& source, Chunk chunk, PieceWalk& walk);

  // One that is free; waits until there is one.
  unsigned take_slot();

  ReadQueue& queue_;
  Slots& slots_;
};

}  // namespace changeover
