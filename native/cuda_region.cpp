#include "cuda_region.hpp"

#include <utility>

#include "cuda_driver.hpp"
#include "cuda_release.hpp"
#include "error.hpp"

namespace changeover {
namespace {

// The driver does not tell an allocation's size, but refuses to map beyond its end.
void check_nothing_beyond(CudaDevice& device, const CudaAllocation& allocation, std::uint64_t nbytes) {
  const std::uint64_t more = nbytes + device.granularity_bytes();
  const CudaReservation addresses(device, more);
  const CudaDriver& driver = CudaDriver::get();
  if (driver.mem_map.attempt(addresses.address(), more, 0, allocation.borrow(), 0) != cuda::kSuccess) return;
  driver.mem_unmap(addresses.address(), more);
  throw ForeignHandle("the memory has more than " + std::to_string(nbytes) + " bytes");
}

}  // namespace

cuda::DevicePointer CudaRegion::range(std::uint64_t offset, std::uint64_t nbytes) const {
  // Written so that no sum can wrap.
  if (offset > this->nbytes() || nbytes > this->nbytes() - offset) {
    throw Misuse("bytes " + std::to_string(offset) + " + " + std::to_string(nbytes) + " leave a region of " +
                 std::to_string(this->nbytes()) + " bytes");
  }
  return address() + offset;
}

std::shared_ptr<CudaRegion> own(std::unique_ptr<CudaRegion> region) {
  ReleaseQueue& queue = region->device().releases();
  const auto give_back = [&queue](CudaRegion* last) noexcept { queue.push(std::unique_ptr<CudaRegion>(last)); };
  return {region.release(), give_back};
}

CudaMappedRegion::CudaMappedRegion(CudaDevice& device, Reservation share, CudaAllocation allocation,
                                   std::uint64_t nbytes, Access access)
    : CudaRegion(device),
      share_(std::move(share)),
      allocation_(std::move(allocation)),
      addresses_(device, nbytes),
      mapping_(addresses_.address(), nbytes, allocation_) {
  set_access(device, addresses_.address(), nbytes, access);
}

std::unique_ptr<CudaMappedRegion> CudaMappedRegion::create(Budget& budget, CudaDevice& device,
                                                           const std::string& slab_id, std::uint64_t nbytes) {
  Reservation share = budget.reserve(slab_id, nbytes);
  const ContextScope scope(device);
  return std::unique_ptr<CudaMappedRegion>(new CudaMappedRegion(
      device, std::move(share), CudaAllocation::create(device, nbytes), nbytes, Access::read_write));
}

std::unique_ptr<CudaMappedRegion> CudaMappedRegion::import(Budget& budget, CudaDevice& device,
                                                           const std::string& slab_id, std::uint64_t nbytes,
                                                           int borrow_fd) {
  const ContextScope scope(device);
  CudaAllocation allocation = CudaAllocation::import(device, borrow_fd);
  check_nothing_beyond(device, allocation, nbytes);
  return std::unique_ptr<CudaMappedRegion>(new CudaMappedRegion(
      device, budget.adopt(slab_id, nbytes), std::move(allocation), nbytes, Access::read_only));
}

UniqueFd CudaMappedRegion::seal() {
  set_access(device(), address(), nbytes(), Access::read_only);
  return allocation_.export_fd();
}

}  // namespace changeover
