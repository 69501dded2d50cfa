// `CudaStaging`: the way of file bytes to a device, through pinned slots.
//
// Invariants:
//  1. A slot is filled again only after the copy out of it has completed (its event), or a tensor
//     would get bytes of another.
//  2. Each reading thread has a lane to itself: a stream and its slots.  Lanes are made when more
//     threads read at once than ever before, and kept.
//  3. Copies are under way when `read_file` returns; `settle` waits for those of all lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cuda_api.hpp"
#include "cuda_device.hpp"
#include "extent_reader.hpp"
#include "lane_pool.hpp"

namespace changeover {

class CudaStaging {
 public:
  // Throws Misuse for less than two slots or an empty one.
  CudaStaging(CudaDevice& device, std::uint64_t slot_bytes, unsigned slots_per_lane);
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;
  ~CudaStaging();

  CudaDevice& device() const noexcept { return device_; }

  // Copy bytes of a file to `pieces` of the memory at `to`; as ExtentReader, and SystemError from the
  // driver.  Blocking for the file, not for the last copies.
  void read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces, cuda::DevicePointer to);
  // Wait until every copy that was begun has completed.  Throws SystemError if one failed.
  void settle();

 private:
  struct Lane;

  CudaDevice& device_;
  const std::uint64_t slot_bytes_;
  const unsigned slots_per_lane_;
  std::unique_ptr<LanePool<Lane>> lanes_;
};

}  // namespace changeover
