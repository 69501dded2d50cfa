// `WritableHostSlab` and `HostSlab`: one allocation of host memory, filled by one writer, then
// readable by every process that is given the fd, and writable by none.
//
// Invariants, and where they come from:
//  1. The memory is a memfd: no path names it, and closing the last fd and mapping frees it.
//  2. Its pages exist before anyone writes to them (fallocate).  A page that cannot be had is an
//     error of the creator, not a SIGBUS of whoever touches it first.
//  3. Its size never changes: F_SEAL_GROW and F_SEAL_SHRINK.  A reader cannot meet SIGBUS.
//  4. From its first mapping on, no second one can be writable: F_SEAL_FUTURE_WRITE (Linux 5.1).
//     After `seal` not even the writer's own: F_SEAL_WRITE, which the kernel grants only when no
//     writable mapping is left.
//  5. The set of seals is final: F_SEAL_SEAL.
//  6. A reader's fd is opened read-only.  Before Linux 6.7 a shared mapping of a write-sealed memfd
//     is refused when the fd could write, whatever protection is asked for.
//  7. A mapping lives while its slab is open or anything made from it (`share`) is alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "budget.hpp"
#include "mapping.hpp"
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
  std::uint32_t crc32(std::uint64_t offset, std::uint64_t nbytes) const;
  // 32 bytes per leaf; `digests` has room for `leaf_count(nbytes, leaf_bytes)` of them.
  void sha256_leaves(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t leaf_bytes,
                     std::span<std::byte> digests) const;
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
  // Allocate.  Throws BudgetExceeded, or SystemError (ENOMEM, ENOSPC where there is no memory).
  static std::unique_ptr<WritableHostSlab> create(Budget& budget, const std::string& slab_id,
                                                  std::uint64_t nbytes);

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool is_open() const;
  // See file_reader.hpp.  Several threads may read into disjoint ranges at once.
  std::uint32_t read_file(int borrow_fd, std::uint64_t file_offset, std::uint64_t offset,
                          std::uint64_t nbytes);
  // Consumes the slab.  Throws Misuse while a read is under way: its bytes would be lost.
  std::unique_ptr<HostSlab> seal();
  // Free.  A read that is under way ends first.
  void close();

 private:
  class Reading;
  WritableHostSlab(UniqueFd fd, Region region);

  const std::uint64_t nbytes_;
  mutable std::mutex mutex_;
  int readings_ = 0;
  UniqueFd fd_;
  std::shared_ptr<Region> region_;  // null when sealed or closed
};

}  // namespace changeover
