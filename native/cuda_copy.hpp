// `CudaCopy`: a copy of a whole region into one of the same size, on the same device or another.
//
// Invariants:
//  1. The copy runs on a stream of its own in the target's context, so copies to several devices run
//     at once.  It waits for no other work: the source is sealed, and nobody else knows the target.
//  2. Where the target's device can reach the source's memory, it reads it over the link between them,
//     through addresses of its own that allow nothing but reading.  No other device is ever allowed to
//     write to a slab, and a sealed one gets no more access than it had.
//  3. Those addresses, and both regions, stay until the copy has completed, also where it failed.
#pragma once

#include <memory>
#include <optional>

#include "cuda_mapping.hpp"
#include "cuda_region.hpp"
#include "cuda_reservation.hpp"
#include "cuda_stream.hpp"

namespace changeover {

class CudaCopy {
 public:
  // Begin.  Throws Misuse where sizes differ, SystemError from the driver.
  static std::unique_ptr<CudaCopy> begin(std::shared_ptr<const CudaRegion> source,
                                         std::shared_ptr<const CudaRegion> target);
  CudaCopy(const CudaCopy&) = delete;
  CudaCopy& operator=(const CudaCopy&) = delete;
  // Waits for the copy, whatever became of it.
  ~CudaCopy();

  // Blocking.  Throws SystemError if the copy failed.
  void wait() const;

 private:
  CudaCopy(std::shared_ptr<const CudaRegion> source, std::shared_ptr<const CudaRegion> target);
  // Where the target's device reads the source; null where it cannot.
  std::optional<cuda::DevicePointer> readable_source();

  const std::shared_ptr<const CudaRegion> source_;
  const std::shared_ptr<const CudaRegion> target_;
  std::optional<CudaReservation> addresses_;
  std::optional<CudaMapping> mapping_;
  CudaStream stream_;
};

}  // namespace changeover
