#include "cuda_release.hpp"

#include <chrono>
#include <thread>
#include <utility>

#include "cuda_device.hpp"
#include "cuda_driver.hpp"
#include "cuda_event.hpp"
#include "cuda_region.hpp"
#include "error.hpp"

namespace changeover {
namespace {

constexpr std::chrono::milliseconds kCaptureRetry{20};

}  // namespace

// Detached: a process that ends does not wait for its GPU.
ReleaseQueue::ReleaseQueue(CudaDevice& device) : device_(device) { std::thread([this] { run(); }).detach(); }

ReleaseQueue::~ReleaseQueue() = default;

void ReleaseQueue::push(std::unique_ptr<CudaRegion> region) noexcept {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(region));
  ++pushed_;
  changed_.notify_all();
}

void ReleaseQueue::settle() {
  std::unique_lock lock(mutex_);
  const std::uint64_t goal = pushed_;
  changed_.wait(lock, [&] { return released_ >= goal; });
}

void ReleaseQueue::hold() {
  std::unique_lock lock(mutex_);
  ++holds_;
  changed_.wait(lock, [&] { return !is_releasing_; });
}

void ReleaseQueue::resume() {
  const std::lock_guard lock(mutex_);
  --holds_;
  changed_.notify_all();
}

void ReleaseQueue::run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !waiting_.empty() && holds_ == 0; });
    is_releasing_ = true;
    // One wait serves all that came in the meantime.
    std::deque<std::unique_ptr<CudaRegion>> batch = std::exchange(waiting_, {});
    const std::uint64_t count = batch.size();
    lock.unlock();
    wait_for_device();
    batch.clear();
    lock.lock();
    released_ += count;
    is_releasing_ = false;
    changed_.notify_all();
  }
}

ReleaseHold::ReleaseHold(CudaDevice& device) : queue_(device.releases()) { queue_.hold(); }

void ReleaseHold::close() {
  if (std::exchange(is_open_, false)) queue_.resume();
}

void ReleaseQueue::wait_for_device() noexcept {
  const CudaDriver& driver = CudaDriver::get();
  for (;;) {
    cuda::Result result = cuda::kSuccess;
    try {
      const ContextScope scope(device_);
      if (driver.context_record_event) {
        const CudaEvent event;
        result = driver.context_record_event.attempt(device_.context(), event.borrow());
        if (result == cuda::kSuccess) result = driver.event_synchronize.attempt(event.borrow());
      } else {
        result = driver.context_synchronize.attempt();
      }
    } catch (const SystemError&) {
      return;  // the context is lost, and with it all work
    }
    if (result != cuda::kStreamCaptureUnsupported) return;
    std::this_thread::sleep_for(kCaptureRetry);
  }
}

}  // namespace changeover
