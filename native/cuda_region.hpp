// `CudaRegion`: device memory that is readable at an address of this process, and what undoes that.
//
// Invariants, and where they come from:
//  1. Addresses stay valid until the GPU work that may use them has completed: the last owner of a
//     region hands it to the device's ReleaseQueue (`own`), whoever and wherever that owner is.
//  2. A slab's bytes do not change after `seal`: the writer's own mapping becomes read-only, and a
//     reader maps nothing else (cuMemSetAccess).  A stray kernel of any process ends that process's
//     context and does not write.  Legacy IPC memory cannot promise this.
//  3. Sizes are what is mapped: multiples of the granularity, the same number at both ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "budget.hpp"
#include "cuda_allocation.hpp"
#include "cuda_api.hpp"
#include "cuda_device.hpp"
#include "cuda_mapping.hpp"
#include "cuda_reservation.hpp"
#include "unique_fd.hpp"

namespace changeover {

class CudaRegion {
 public:
  virtual ~CudaRegion() = default;
  CudaRegion(const CudaRegion&) = delete;
  CudaRegion& operator=(const CudaRegion&) = delete;

  CudaDevice& device() const noexcept { return device_; }
  virtual cuda::DevicePointer address() const noexcept = 0;
  virtual std::uint64_t nbytes() const noexcept = 0;
  // Null where it is not memory that can be mapped a second time.
  virtual const CudaAllocation* allocation() const noexcept { return nullptr; }
  // Forbid writing, as far as the kind of memory allows, and answer what a reader imports.  Device
  // work that writes must have completed.
  virtual UniqueFd seal() = 0;

  // The address of `nbytes` at `offset`.  Throws Misuse where the range leaves the region.
  cuda::DevicePointer range(std::uint64_t offset, std::uint64_t nbytes) const;

 protected:
  explicit CudaRegion(CudaDevice& device) : device_(device) {}

 private:
  CudaDevice& device_;
};

// Shared ownership that ends in the device's ReleaseQueue.
std::shared_ptr<CudaRegion> own(std::unique_ptr<CudaRegion> region);

// Physical memory with its mapping.  Members are undone in reverse order.
class CudaMappedRegion final : public CudaRegion {
 public:
  // New memory, writable by this process alone.
  static std::unique_ptr<CudaMappedRegion> create(Budget& budget, CudaDevice& device,
                                                  const std::string& slab_id, std::uint64_t nbytes);
  // Received memory, read-only.  Throws ForeignHandle if it is none of this device or size.
  static std::unique_ptr<CudaMappedRegion> import(Budget& budget, CudaDevice& device,
                                                  const std::string& slab_id, std::uint64_t nbytes,
                                                  int borrow_fd);

  cuda::DevicePointer address() const noexcept override { return mapping_.address(); }
  std::uint64_t nbytes() const noexcept override { return mapping_.nbytes(); }
  const CudaAllocation* allocation() const noexcept override { return &allocation_; }
  UniqueFd seal() override;

 private:
  CudaMappedRegion(CudaDevice& device, Reservation share, CudaAllocation allocation, std::uint64_t nbytes,
                   Access access);

  Reservation share_;
  CudaAllocation allocation_;
  CudaReservation addresses_;
  CudaMapping mapping_;
};

}  // namespace changeover
