// `RemappedRegion`: device addresses that stay while the slabs behind them are exchanged.
//
// Captured CUDA graphs and compiled code keep the addresses they were made with; after `exchange` they
// read the new bytes.  Tensors over the region keep its addresses, not a version: what they show changes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_mapping.hpp"
#include "cuda_region.hpp"
#include "cuda_reservation.hpp"

namespace changeover {

class RemappedRegion {
 public:
  // Reserve addresses; nothing is mapped yet.  `nbytes` must be a multiple of the granularity.
  RemappedRegion(CudaDevice& device, std::uint64_t nbytes);
  RemappedRegion(const RemappedRegion&) = delete;
  RemappedRegion& operator=(const RemappedRegion&) = delete;
  // Waits for the device where slabs are mapped; see `empty`.
  ~RemappedRegion();

  CudaDevice& device() const noexcept { return device_; }
  std::uint64_t nbytes() const noexcept { return addresses_.nbytes(); }
  cuda::DevicePointer range(std::uint64_t offset, std::uint64_t nbytes) const;

  // Wait for the device, then put `slabs` one after the other where others were, read-only.  They must
  // fill the region.  Where a step fails, the old slabs are put back and the error is thrown; should
  // that fail too, the region is left empty.  Blocking.  The caller sees to it that nobody submits
  // work that uses the region meanwhile.
  void exchange(std::vector<std::shared_ptr<const CudaRegion>> slabs);
  // Wait for the device and unmap the slabs; the addresses stay reserved.
  void empty();

 private:
  using Slabs = std::vector<std::shared_ptr<const CudaRegion>>;
  std::vector<CudaMapping> map(const Slabs& slabs) const;
  void wait_for_device() const;

  CudaDevice& device_;
  std::mutex mutex_;
  CudaReservation addresses_;
  Slabs slabs_;                        // keeps the memory of what is mapped
  std::vector<CudaMapping> mappings_;  // declared last: unmapped first
};

}  // namespace changeover
