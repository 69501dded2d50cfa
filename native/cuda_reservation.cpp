#include "cuda_reservation.hpp"

#include <utility>

#include "cuda_driver.hpp"

namespace changeover {

CudaReservation::CudaReservation(CudaDevice& device, std::uint64_t nbytes) : nbytes_(nbytes) {
  const ContextScope scope(device);
  CudaDriver::get().address_reserve(&address_, nbytes, 0, 0, 0);
}

CudaReservation::CudaReservation(CudaReservation&& other) noexcept
    : address_(std::exchange(other.address_, 0)), nbytes_(std::exchange(other.nbytes_, 0)) {}

CudaReservation::~CudaReservation() {
  if (address_ != 0) static_cast<void>(CudaDriver::get().address_free.attempt(address_, nbytes_));
}

}  // namespace changeover
