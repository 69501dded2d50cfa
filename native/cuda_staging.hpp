// `CudaStaging`: the way of file bytes to a device, through pinned slots.
//
// Invariants:
//  1. A slot is filled again only after the copies out of it have completed, or a tensor would get bytes of
//     another.
//  2. Each reading thread has a lane to itself: slots that stay near its processor.  Lanes are made when
//     more threads read at once than ever before, and kept.  The copies of all go through one queue.
//  3. Copies are under way when `read_file` returns: whoever frees or seals that memory waits for them
//     first (SlabCopies).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cuda_api.hpp"
#include "cuda_copy_queue.hpp"
#include "cuda_device.hpp"
#include "extent_reader.hpp"
#include "lane_pool.hpp"

namespace changeover {

class CudaStaging {
 public:
  // Throws Misuse for less than two slots, and for slots that are not whole blocks of direct I/O.
  CudaStaging(CudaDevice& device, std::uint64_t slot_bytes, unsigned slots_per_lane);
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;
  ~CudaStaging();

  CudaDevice& device() const noexcept { return device_; }

  // Copy bytes of a file to `pieces` of the memory at `to`; as ExtentReader, and what an
  // earlier one of `copies` failed with.  Blocking for the file, not for the last copies, which `copies`
  // counts.
  void read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces, cuda::DevicePointer to,
                 const std::shared_ptr<SlabCopies>& copies);

 private:
  struct Lane;

  CudaDevice& device_;
  const std::uint64_t slot_bytes_;
  const unsigned slots_per_lane_;
  std::unique_ptr<LanePool<Lane>> lanes_;
  std::unique_ptr<CudaCopyQueue> copies_;  // last: it reads from the lanes' slots
};

}  // namespace changeover
