// `CudaIpcMemory`: legacy CUDA IPC, for devices whose memory cannot be exported as an fd.
//
// Weaker than mapped memory in every way but availability, by the driver's design: readers can write;
// the exporter must outlive its importers; the handle is of a whole block and is opened by other
// processes of the same PID namespace only, not by the exporter; it is refused under MIG.  The 64-byte
// handle travels as the content of a sealed memfd, so that it is sent like any slab.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "budget.hpp"
#include "cuda_region.hpp"

namespace changeover {

// A block that this process allocated.
class CudaIpcMemory final : public CudaRegion {
 public:
  // Throws BudgetExceeded or DeviceMemoryExceeded.
  static std::unique_ptr<CudaIpcMemory> create(Budget& budget, CudaDevice& device, const std::string& slab_id,
                                               std::uint64_t nbytes);
  ~CudaIpcMemory() override;

  cuda::DevicePointer address() const noexcept override { return address_; }
  std::uint64_t nbytes() const noexcept override { return nbytes_; }
  UniqueFd seal() override;

 private:
  CudaIpcMemory(CudaDevice& device, Reservation share, cuda::DevicePointer take_address, std::uint64_t nbytes);

  Reservation share_;
  cuda::DevicePointer address_;
  std::uint64_t nbytes_;
};

// A block of another process.
class CudaIpcImport final : public CudaRegion {
 public:
  // Whether an fd could be such a handle: it is a sealed memfd, which device memory never is.
  static bool is_handle(int borrow_fd) noexcept;
  // Throws ForeignHandle if the memfd is no handle for this device and size.
  static std::unique_ptr<CudaIpcImport> open(Budget& budget, CudaDevice& device, const std::string& slab_id,
                                             std::uint64_t nbytes, int borrow_fd);
  ~CudaIpcImport() override;

  cuda::DevicePointer address() const noexcept override { return address_; }
  std::uint64_t nbytes() const noexcept override { return nbytes_; }
  UniqueFd seal() override;

 private:
  CudaIpcImport(CudaDevice& device, Reservation share, cuda::DevicePointer take_address, std::uint64_t nbytes);

  Reservation share_;
  cuda::DevicePointer address_;
  std::uint64_t nbytes_;
};

}  // namespace changeover
