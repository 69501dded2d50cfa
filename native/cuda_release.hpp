// `ReleaseQueue`: unmaps device memory once the GPU work that may use it has completed.
//
// A tensor can die while kernels that read it are queued, on streams that this code does not know.
// Its deleter must neither unmap under them nor wait for them: it may run with Python's global lock
// held.  So memory goes to a thread of its device, which records an event over all work of the context
// (cuCtxRecordEvent; before CUDA 12.5 it waits for the context), waits for it, and unmaps.
//
// Recording such an event, like any device-wide wait, ends a stream capture that is under way in the
// same context (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED).  Who captures graphs keeps the thread from it by a
// `ReleaseHold`.  Where nobody does, the capture fails, and the memory is released after it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace changeover {

class CudaDevice;
class CudaRegion;

class ReleaseQueue {
 public:
  // Starts the thread.  It and the queue live until the process ends, as devices do.
  explicit ReleaseQueue(CudaDevice& device);
  ReleaseQueue(const ReleaseQueue&) = delete;
  ReleaseQueue& operator=(const ReleaseQueue&) = delete;
  ~ReleaseQueue();

  // Release `region` when the work submitted until now has completed.  Never waits for the GPU.
  void push(std::unique_ptr<CudaRegion> region) noexcept;
  // Wait until all that was pushed before is released.  Blocking.
  void settle();

  // Release nothing until `resume`, which is called once for each `hold`.  Waits for what is being released.
  void hold();
  void resume();

 private:
  void run() noexcept;
  void wait_for_device() noexcept;

  CudaDevice& device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<CudaRegion>> waiting_;
  std::uint64_t pushed_ = 0;
  std::uint64_t released_ = 0;
  std::uint64_t holds_ = 0;
  bool is_releasing_ = false;
};

// While it lives and is not closed, a stream of the device's context can be captured: nothing is released.
// To close the last owner of memory meanwhile, on the thread that holds, is a deadlock.
class ReleaseHold {
 public:
  explicit ReleaseHold(CudaDevice& device);
  ReleaseHold(const ReleaseHold&) = delete;
  ReleaseHold& operator=(const ReleaseHold&) = delete;
  ~ReleaseHold() { close(); }

  void close();

 private:
  ReleaseQueue& queue_;
  bool is_open_ = true;
};

}  // namespace changeover
