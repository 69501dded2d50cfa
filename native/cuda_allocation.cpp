#include "cuda_allocation.hpp"

#include <fcntl.h>

#include <cerrno>
#include <string>
#include <utility>

#include "cuda_driver.hpp"
#include "cuda_release.hpp"
#include "error.hpp"

namespace changeover {

CudaAllocation CudaAllocation::create(CudaDevice& device, std::uint64_t nbytes) {
  const ContextScope scope(device);
  const CudaDriver& driver = CudaDriver::get();
  const cuda::AllocationProperties properties = device.allocation_properties();
  cuda::AllocationHandle handle = 0;
  cuda::Result result = driver.mem_create.attempt(&handle, nbytes, &properties, 0);
  if (result == cuda::kOutOfMemory) {
    device.releases().settle();  // memory on its way back counts as free
    result = driver.mem_create.attempt(&handle, nbytes, &properties, 0);
  }
  if (result == cuda::kOutOfMemory) {
    throw DeviceMemoryExceeded("a slab on " + device.uuid(), nbytes, device.memory().free_bytes);
  }
  if (result != cuda::kSuccess) driver.mem_create.fail(result);
  return CudaAllocation(handle);
}

CudaAllocation CudaAllocation::import(CudaDevice& device, int borrow_fd) {
  const ContextScope scope(device);
  const CudaDriver& driver = CudaDriver::get();
  cuda::AllocationHandle handle = 0;
  // The driver takes the fd itself where its signature says "pointer to an OS handle".
  void* const os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(borrow_fd));
  const cuda::Result result = driver.mem_import.attempt(&handle, os_handle, cuda::kHandlePosixFd);
  // What drivers answer for an fd that is a file, a socket or a memfd (580: kUnknown).
  if (result == cuda::kInvalidValue || result == cuda::kInvalidHandle || result == cuda::kInvalidDevice ||
      result == cuda::kUnknown) {
    throw ForeignHandle("the fd is not device memory: the driver answers " + std::to_string(result));
  }
  if (result != cuda::kSuccess) driver.mem_import.fail(result);
  CudaAllocation allocation(handle);
  cuda::AllocationProperties properties{};
  driver.mem_get_properties(&properties, handle);
  if (properties.location.type != cuda::kLocationDevice || properties.location.id != device.ordinal()) {
    throw ForeignHandle("the fd is memory of device " + std::to_string(properties.location.id) +
                        " here, expected " + std::to_string(device.ordinal()) + " (" + device.uuid() + ")");
  }
  return allocation;
}

CudaAllocation::CudaAllocation(CudaAllocation&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}

CudaAllocation::~CudaAllocation() {
  if (handle_ != 0) static_cast<void>(CudaDriver::get().mem_release.attempt(handle_));
}

UniqueFd CudaAllocation::export_fd() const {
  int fd = -1;
  CudaDriver::get().mem_export(&fd, handle_, cuda::kHandlePosixFd, 0);
  UniqueFd exported(fd);
  // Whether the driver sets it is not documented.
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) throw SystemError("fcntl(F_SETFD)", errno);
  return exported;
}

}  // namespace changeover
