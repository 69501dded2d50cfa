// `CudaReserve`: device memory that is kept from every process, in pieces, until it is wanted.
//
// Pieces are never mapped and never exported: nobody else can see them, and giving one up waits for
// nothing.  They end with the process.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda_allocation.hpp"
#include "cuda_device.hpp"

namespace changeover {

class CudaReserve {
 public:
  // `piece_bytes` must be a multiple of the device's granularity, else Misuse.
  CudaReserve(CudaDevice& device, std::uint64_t piece_bytes);

  // Hold `pieces`, or as many as the device has memory for; answers how many are held.
  std::uint64_t resize(std::uint64_t pieces);
  std::uint64_t pieces() const;

 private:
  CudaDevice& device_;
  const std::uint64_t piece_bytes_;
  mutable std::mutex mutex_;
  std::vector<CudaAllocation> held_;
};

}  // namespace changeover
