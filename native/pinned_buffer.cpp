#include "pinned_buffer.hpp"

#include <utility>

#include "cuda_driver.hpp"

namespace changeover {

PinnedBuffer::PinnedBuffer(std::uint64_t nbytes) {
  void* address = nullptr;
  CudaDriver::get().host_alloc(&address, nbytes, cuda::kHostAllocPortable);
  bytes_ = {static_cast<std::byte*>(address), nbytes};
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

PinnedBuffer::~PinnedBuffer() {
  if (bytes_.data() != nullptr) static_cast<void>(CudaDriver::get().host_free.attempt(bytes_.data()));
}

}  // namespace changeover
