// `WritableCudaSlab` and `CudaSlab`: device memory filled by one writer, then readable by every process
// that is given the fd; cuda_region.hpp says what that guarantees.
#pragma once

#include <cstddef>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "budget.hpp"
#include "cuda_region.hpp"
#include "cuda_staging.hpp"
#include "slab_range.hpp"
#include "unique_fd.hpp"

namespace changeover {

// Readable.  All members are thread-safe; memory stays while a call or a tensor uses it.
class CudaSlab {
 public:
  CudaSlab(UniqueFd fd, std::shared_ptr<CudaRegion> region);
  // Map a received slab.  Throws ForeignHandle if the fd is not memory of `device` with `nbytes`.
  static std::unique_ptr<CudaSlab> import(Budget& budget, CudaDevice& device, const std::string& slab_id,
                                          std::uint64_t nbytes, UniqueFd take_fd);

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool is_open() const;
  int borrow_fd() const;
  std::uint32_t crc32(std::uint64_t offset, std::uint64_t nbytes) const;
  // Throws Misuse where a range leaves the slab, as those below.
  void check_range(std::uint64_t offset, std::uint64_t nbytes) const;
  // The SHA-256 leaves of all ranges (offset and length), one after the other, 32 bytes per leaf: `leaves`
  // has room for `leaf_count` of each of them.  And the CRC32 of each range, unless `crcs` is empty.
  // With `spread` it takes about that long and is gentle.
  void digest(std::span<const SlabRange> ranges, std::uint64_t leaf_bytes, std::span<std::byte> leaves,
              std::span<std::uint32_t> crcs, std::chrono::nanoseconds spread = {}) const;
  // The region, kept alive beyond `close`.
  std::shared_ptr<const CudaRegion> share() const;
  // Gives up this owner's reference.  Where it is the last one, waits for the GPU and for the release.
  void close();

 private:
  const std::uint64_t nbytes_;
  mutable std::mutex mutex_;
  UniqueFd fd_;
  std::shared_ptr<CudaRegion> region_;  // null when closed
};

// Being filled.  All members are thread-safe.
class WritableCudaSlab {
 public:
  // `nbytes` must be a multiple of the granularity.  Throws BudgetExceeded or DeviceMemoryExceeded.
  static std::unique_ptr<WritableCudaSlab> create(Budget& budget, std::shared_ptr<CudaStaging> staging,
                                                  const std::string& slab_id, std::uint64_t nbytes,
                                                  bool is_legacy_ipc);
  WritableCudaSlab(const WritableCudaSlab&) = delete;
  WritableCudaSlab& operator=(const WritableCudaSlab&) = delete;
  // Where it was neither sealed nor closed, copies that are under way end first.
  ~WritableCudaSlab();

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  bool is_open() const;
  // See cuda_staging.hpp.  Several threads may read into disjoint ranges at once.
  void read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces);
  // Of one piece; answers its CRC32.
  std::uint32_t read_file(int borrow_fd, std::uint64_t file_offset, std::uint64_t offset, std::uint64_t nbytes) {
    Piece piece{offset, nbytes};
    read_file(borrow_fd, file_offset, {&piece, 1});
    return piece.crc;
  }
  // Fill all of it from a slab of the same size, on this device or another; cuda_copy.hpp.  Blocking.
  void copy_from(const CudaSlab& source);
  // Consumes the slab, after all copies into it.  Throws Misuse while it is being filled, SystemError where a
  // copy failed.
  std::unique_ptr<CudaSlab> seal();
  // Free.  Copies that are under way end first.
  void close();

 private:
  class Filling;
  WritableCudaSlab(std::shared_ptr<CudaStaging> staging, std::shared_ptr<CudaRegion> region);

  const std::uint64_t nbytes_;
  const std::shared_ptr<CudaStaging> staging_;
  const std::shared_ptr<SlabCopies> copies_ = std::make_shared<SlabCopies>();
  mutable std::mutex mutex_;
  int fillings_ = 0;
  std::shared_ptr<CudaRegion> region_;  // null when sealed or closed
};

}  // namespace changeover
