// `WritableHostSlab` and `HostSlab`: one allocation of host memory, filled by one writer, then
// readable by every process that is given the fd, and writable by none.
//
// Invariants, and where they come from:
//  1. The memory is a memfd: no path names it, and closing the last fd and mapping frees it.
//  2. Its pages exist before anyone writes to them (memfd_pages.hpp); they are taken block by block as the
//     slab is filled, and the rest when it is sealed.  A page that cannot be had is an error of the creator,
//     not a SIGBUS of whoever touches it first.
//  3. Its size never changes: F_SEAL_GROW and F_SEAL_SHRINK.  A reader cannot meet SIGBUS.
//  4. From its first mapping on, no second one can be writable: F_SEAL_FUTURE_WRITE (Linux 5.1).
//     After `seal` not even the writer's own: F_SEAL_WRITE, which the kernel grants only when no
//     writable mapping is left.
//  5. The set of seals is final: F_SEAL_SEAL.
//  6. A reader's fd is opened read-only.  Before Linux 6.7 a shared mapping of a write-sealed memfd
//     is refused when the fd could write, whatever protection is asked for.
//  7. A mapping lives while its slab is open or anything made from it (`share`) is alive.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "budget.hpp"
#include "extent_reader.hpp"
#include "mapping.hpp"
#include "slab_range.hpp"
#include "unique_fd.hpp"

namespace changeover {

// A mapping with the share of the budget that its memory takes.
struct Region {
  Reservation reservation;  // declared first: given back after the memory is unmapped
  Mapping mapping;
};

// Readable.  All members are thread-safe; a slab that is closed while another thread reads from it
// stays mapped until that read is done.
class HostSlab {
 public:
  HostSlab(UniqueFd fd, std::shared_ptr<const Region> region);

  // Map a received slab.  Throws ForeignHandle if the fd is no sealed slab of `nbytes` bytes.
  static std::unique_ptr<HostSlab> import(Budget& budget, const std::string& slab_id, std::uint64_t nbytes,
                                          UniqueFd take_fd);

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool is_open() const;
  int borrow_fd() const;
  // Throws Misuse where a range leaves the slab, as those below.
  void check_range(std::uint64_t offset, std::uint64_t nbytes) const;
  std::uint32_t crc32(std::uint64_t offset, std::uint64_t nbytes) const;
  // The SHA-256 leaves of all ranges, one after the other, 32 bytes per leaf: `leaves` has room for
  // `leaf_count` of each of them.  And the CRC32 of each range, unless `crcs` is empty.  Reads each byte once.
  // A core that hashes keeps nobody else's from computing: there is nothing to spread over a time.
  void digest(std::span<const SlabRange> ranges, std::uint64_t leaf_bytes, std::span<std::byte> leaves,
              std::span<std::uint32_t> crcs, std::chrono::nanoseconds spread = {}) const;
  // The region, kept alive beyond `close`.
  std::shared_ptr<const Region> share() const;
  void close();

 private:
  const std::uint64_t nbytes_;
  mutable std::mutex mutex_;
  UniqueFd fd_;
  std::shared_ptr<const Region> region_;  // null when closed
};

// Being filled.  All members are thread-safe.
class WritableHostSlab {
 public:
  // Its pages are allocated as it is filled.  Throws BudgetExceeded, or SystemError.
  static std::unique_ptr<WritableHostSlab> create(Budget& budget, const std::string& slab_id,
                                                  std::uint64_t nbytes);

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool is_open() const;
  // Bytes whose pages were not taken yet.
  std::uint64_t missing_bytes() const;
  // See extent_reader.hpp; SystemError (ENOMEM, ENOSPC) where there is no memory.  Several threads may read
  // into disjoint ranges at once; they wait for each other's pages, so they better fill several slabs.
  void read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces);
  // Of one piece; answers its CRC32.
  std::uint32_t read_file(int borrow_fd, std::uint64_t file_offset, std::uint64_t offset, std::uint64_t nbytes) {
    Piece piece{offset, nbytes};
    read_file(borrow_fd, file_offset, {&piece, 1});
    return piece.crc;
  }
  // Consumes the slab.  Throws Misuse while a read is under way: its bytes would be lost.
  std::unique_ptr<HostSlab> seal();
  // Free.  A read that is under way ends first.
  void close();

 private:
  class Reading;
  enum class Block : std::uint8_t { missing, being_taken, taken };
  struct Memory {
    Region region;
    UniqueFd fd;
  };
  explicit WritableHostSlab(Memory memory);
  void take_blocks(const Memory& memory, std::uint64_t offset, std::uint64_t nbytes);

  const std::uint64_t nbytes_;
  mutable std::mutex mutex_;
  std::condition_variable has_taken_;
  std::vector<Block> blocks_;
  std::uint64_t taken_bytes_ = 0;
  int readings_ = 0;
  std::shared_ptr<Memory> memory_;  // null when sealed or closed
};

}  // namespace changeover
