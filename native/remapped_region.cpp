#include "remapped_region.hpp"

#include <string>
#include <utility>

#include "cuda_driver.hpp"
#include "error.hpp"

namespace changeover {
namespace {

std::uint64_t whole_steps(CudaDevice& device, std::uint64_t nbytes) {
  if (nbytes == 0 || nbytes % device.granularity_bytes() != 0) {
    throw Misuse("a region cannot have " + std::to_string(nbytes) + " bytes");
  }
  return nbytes;
}

}  // namespace

RemappedRegion::RemappedRegion(CudaDevice& device, std::uint64_t nbytes)
    : device_(device), addresses_(device, whole_steps(device, nbytes)) {}

RemappedRegion::~RemappedRegion() {
  if (mappings_.empty()) return;
  try {
    wait_for_device();
  } catch (const SystemError&) {
    return;  // the context is lost, and with it all work
  }
}

cuda::DevicePointer RemappedRegion::range(std::uint64_t offset, std::uint64_t nbytes) const {
  if (offset > this->nbytes() || nbytes > this->nbytes() - offset) {
    throw Misuse("bytes " + std::to_string(offset) + " + " + std::to_string(nbytes) + " leave a region of " +
                 std::to_string(this->nbytes()) + " bytes");
  }
  return addresses_.address() + offset;
}

void RemappedRegion::exchange(Slabs slabs) {
  std::uint64_t total = 0;
  for (const auto& slab : slabs) {
    if (slab->allocation() == nullptr) throw Misuse("memory of legacy IPC cannot be mapped a second time");
    if (&slab->device() != &device_) throw Misuse("a slab of another device is exchanged into a region");
    total += slab->nbytes();
  }
  if (total != nbytes()) {
    throw Misuse("slabs of " + std::to_string(total) + " bytes are exchanged into a region of " +
                 std::to_string(nbytes()));
  }
  const std::lock_guard lock(mutex_);
  wait_for_device();
  mappings_.clear();
  try {
    mappings_ = map(slabs);
  } catch (...) {
    const Slabs old = std::exchange(slabs_, {});
    if (!old.empty()) {
      mappings_ = map(old);  // throws what keeps the old slabs from coming back: the graver error
      slabs_ = old;
    }
    throw;
  }
  slabs_ = std::move(slabs);
}

void RemappedRegion::empty() {
  const std::lock_guard lock(mutex_);
  wait_for_device();
  mappings_.clear();
  slabs_.clear();
}

// Unmaps what it mapped where it fails.
std::vector<CudaMapping> RemappedRegion::map(const Slabs& slabs) const {
  std::vector<CudaMapping> mappings;
  mappings.reserve(slabs.size());
  cuda::DevicePointer at = addresses_.address();
  for (const auto& slab : slabs) {
    mappings.emplace_back(at, slab->nbytes(), *slab->allocation());
    at += slab->nbytes();
  }
  set_access(device_, addresses_.address(), nbytes(), Access::read_only);
  return mappings;
}

void RemappedRegion::wait_for_device() const {
  const ContextScope scope(device_);
  CudaDriver::get().context_synchronize();
}

}  // namespace changeover
