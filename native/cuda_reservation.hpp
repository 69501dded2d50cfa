// `CudaReservation`: the one owner of a range of device addresses, mapped or not.
#pragma once

#include <cstdint>

#include "cuda_api.hpp"
#include "cuda_device.hpp"

namespace changeover {

class CudaReservation {
 public:
  // `nbytes` must be a multiple of the device's granularity.  Throws SystemError.
  CudaReservation(CudaDevice& device, std::uint64_t nbytes);
  CudaReservation(CudaReservation&& other) noexcept;
  CudaReservation& operator=(CudaReservation&&) = delete;
  // Nothing may be mapped in the range any more.
  ~CudaReservation();

  cuda::DevicePointer address() const noexcept { return address_; }
  std::uint64_t nbytes() const noexcept { return nbytes_; }

 private:
  cuda::DevicePointer address_ = 0;
  std::uint64_t nbytes_ = 0;
};

}  // namespace changeover
