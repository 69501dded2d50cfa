// `CudaEvent`: a point in a stream's or a context's work that can be waited for.
#pragma once

#include "cuda_api.hpp"

namespace changeover {

class CudaEvent {
 public:
  // In the current context.  Waiting for it sleeps, so that it does not take a processor from serving.
  CudaEvent();
  CudaEvent(CudaEvent&& other) noexcept;
  CudaEvent& operator=(CudaEvent&&) = delete;
  ~CudaEvent();

  cuda::Event borrow() const noexcept { return event_; }
  void record(cuda::Stream stream) const;
  // Whether that point is reached; true if it was never recorded.
  bool has_happened() const;
  // Blocking.  Returns at once if it was never recorded.
  void synchronize() const;

 private:
  cuda::Event event_ = nullptr;
};

}  // namespace changeover
