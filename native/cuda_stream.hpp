// `CudaStream`: an order of device work that waits for no other stream, the NULL stream included.
#pragma once

#include "cuda_api.hpp"

namespace changeover {

class CudaStream {
 public:
  // In the current context.  A smaller `priority` goes first.
  explicit CudaStream(int priority);
  CudaStream(CudaStream&& other) noexcept;
  CudaStream& operator=(CudaStream&&) = delete;
  // Work that is in it still runs.
  ~CudaStream();

  cuda::Stream borrow() const noexcept { return stream_; }
  // Blocking.
  void synchronize() const;

 private:
  cuda::Stream stream_ = nullptr;
};

}  // namespace changeover
