#include "cuda_event.hpp"

#include <utility>

#include "cuda_driver.hpp"

namespace changeover {

CudaEvent::CudaEvent() {
  CudaDriver::get().event_create(&event_, cuda::kEventBlockingSync | cuda::kEventDisableTiming);
}

CudaEvent::CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

CudaEvent::~CudaEvent() {
  if (event_ != nullptr) static_cast<void>(CudaDriver::get().event_destroy.attempt(event_));
}

void CudaEvent::record(cuda::Stream stream) const { CudaDriver::get().event_record(event_, stream); }

bool CudaEvent::has_happened() const {
  const CudaDriver& driver = CudaDriver::get();
  const cuda::Result result = driver.event_query.attempt(event_);
  if (result == cuda::kNotReady) return false;
  if (result != cuda::kSuccess) driver.event_query.fail(result);
  return true;
}

void CudaEvent::synchronize() const { CudaDriver::get().event_synchronize(event_); }

}  // namespace changeover
