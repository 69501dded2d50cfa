// `CudaAllocation`: the one owner in this process of a handle to physical device memory.
//
// The memory lives while any handle, mapping or exported fd of it does, in any process.
#pragma once

#include <cstdint>

#include "cuda_api.hpp"
#include "cuda_device.hpp"
#include "unique_fd.hpp"

namespace changeover {

class CudaAllocation {
 public:
  // `nbytes` must be a multiple of the device's granularity.  Throws DeviceMemoryExceeded.
  static CudaAllocation create(CudaDevice& device, std::uint64_t nbytes);
  // Throws ForeignHandle unless the fd is memory of `device`.
  static CudaAllocation import(CudaDevice& device, int borrow_fd);

  CudaAllocation(CudaAllocation&& other) noexcept;
  CudaAllocation& operator=(CudaAllocation&&) = delete;
  ~CudaAllocation();

  cuda::AllocationHandle borrow() const noexcept { return handle_; }
  // A new fd, closed on exec.
  UniqueFd export_fd() const;

 private:
  explicit CudaAllocation(cuda::AllocationHandle take_handle) noexcept : handle_(take_handle) {}

  cuda::AllocationHandle handle_ = 0;
};

}  // namespace changeover
