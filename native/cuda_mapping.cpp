#include "cuda_mapping.hpp"

#include <string>
#include <utility>

#include "cuda_driver.hpp"
#include "error.hpp"

namespace changeover {

void set_access(CudaDevice& device, cuda::DevicePointer address, std::uint64_t nbytes, Access access) {
  const ContextScope scope(device);
  const cuda::AccessDescription description{
      {cuda::kLocationDevice, device.ordinal()},
      access == Access::read_write ? cuda::kAccessReadWrite : cuda::kAccessRead};
  CudaDriver::get().mem_set_access(address, nbytes, &description, 1);
}

CudaMapping::CudaMapping(cuda::DevicePointer address, std::uint64_t nbytes, const CudaAllocation& allocation) {
  const CudaDriver& driver = CudaDriver::get();
  const cuda::Result result = driver.mem_map.attempt(address, nbytes, 0, allocation.borrow(), 0);
  // What drivers answer for more bytes than there are (580: kNotSupported).
  if (result == cuda::kInvalidValue || result == cuda::kNotSupported) {
    throw ForeignHandle("the memory cannot be mapped with " + std::to_string(nbytes) + " bytes");
  }
  if (result != cuda::kSuccess) driver.mem_map.fail(result);
  address_ = address;
  nbytes_ = nbytes;
}

CudaMapping::CudaMapping(CudaMapping&& other) noexcept
    : address_(std::exchange(other.address_, 0)), nbytes_(std::exchange(other.nbytes_, 0)) {}

CudaMapping::~CudaMapping() {
  if (address_ != 0) static_cast<void>(CudaDriver::get().mem_unmap.attempt(address_, nbytes_));
}

}  // namespace changeover
