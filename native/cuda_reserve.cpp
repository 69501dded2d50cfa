#include "cuda_reserve.hpp"

#include <string>

#include "error.hpp"

namespace changeover {

CudaReserve::CudaReserve(CudaDevice& device, std::uint64_t piece_bytes)
    : device_(device), piece_bytes_(piece_bytes) {
  if (piece_bytes == 0 || piece_bytes % device.granularity_bytes() != 0) {
    throw Misuse("a piece of a reserve cannot have " + std::to_string(piece_bytes) + " bytes");
  }
}

std::uint64_t CudaReserve::resize(std::uint64_t pieces) {
  const ContextScope scope(device_);
  const std::lock_guard lock(mutex_);
  while (held_.size() > pieces) held_.pop_back();
  try {
    while (held_.size() < pieces) held_.push_back(CudaAllocation::create(device_, piece_bytes_));
  } catch (const DeviceMemoryExceeded&) {
    // What there is, is held.
  }
  return held_.size();
}

std::uint64_t CudaReserve::pieces() const {
  const std::lock_guard lock(mutex_);
  return held_.size();
}

}  // namespace changeover
