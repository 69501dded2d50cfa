#include "cuda_stream.hpp"

#include <utility>

#include "cuda_driver.hpp"

namespace changeover {

CudaStream::CudaStream(int priority) {
  CudaDriver::get().stream_create(&stream_, cuda::kStreamNonBlocking, priority);
}

CudaStream::CudaStream(CudaStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}

CudaStream::~CudaStream() {
  if (stream_ != nullptr) static_cast<void>(CudaDriver::get().stream_destroy.attempt(stream_));
}

void CudaStream::synchronize() const { CudaDriver::get().stream_synchronize(stream_); }

}  // namespace changeover
