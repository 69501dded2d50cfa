// `CudaMapping`: physical memory at device addresses, until the end of its life.
#pragma once

#include <cstdint>

#include "cuda_allocation.hpp"
#include "cuda_api.hpp"
#include "cuda_device.hpp"
#include "mapping.hpp"

namespace changeover {

// Allow `access` to mapped memory; the device enforces it for kernels, the driver for its own calls.
void set_access(CudaDevice& device, cuda::DevicePointer address, std::uint64_t nbytes, Access access);

class CudaMapping {
 public:
  // Map all of an allocation, without access yet.  `address` lies in a reservation that outlives this.
  // Throws ForeignHandle where the allocation does not have exactly `nbytes`.
  CudaMapping(cuda::DevicePointer address, std::uint64_t nbytes, const CudaAllocation& allocation);
  CudaMapping(CudaMapping&& other) noexcept;
  CudaMapping& operator=(CudaMapping&&) = delete;
  // The work that uses the addresses must have completed.
  ~CudaMapping();

  cuda::DevicePointer address() const noexcept { return address_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }

 private:
  cuda::DevicePointer address_ = 0;
  std::uint64_t nbytes_ = 0;
};

}  // namespace changeover
