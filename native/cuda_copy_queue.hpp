// `CudaCopyQueue`: copies from pinned memory to one device, in batches.
//
// A copy engine pauses for some 3 us between one copy and the next: 1 MiB at a time reaches 86 % of the bus of
// an H200, 512 KiB 75 %.  Copies that the driver gets in one call follow each other without it.  So a thread submits
// together what has become ready while earlier batches were under way.
//
// Invariants:
//  1. Three batches are under way at most, none of them large: the engine never waits for the next one, the next
//     one has time to grow, and slots come free a few at a time.  All at once, and all readers would wait at the
//     same time and then take memory bandwidth from the engine at the same time.
//  2. A copy counts for its slot and for its slab from `add` until it has completed or failed, and it can have
//     begun only in between: whoever waits for either may reuse or free the memory at that end.
//  3. A copy that failed is known to its slab before it counts no more.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_api.hpp"
#include "cuda_device.hpp"
#include "cuda_event.hpp"
#include "cuda_stream.hpp"

namespace changeover {

// What a thread does that waits for copies, again and again: waking one takes 7 us, and whoever wakes all readers
// after each batch submits nothing meanwhile.
void sleep_shortly();

// Copies that have not ended yet.
class CopyCount {
 public:
  void begin() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  // What the copies did happens before `is_zero` says so.
  void end() noexcept { count_.fetch_sub(1, std::memory_order_release); }
  bool is_zero() const noexcept { return count_.load(std::memory_order_acquire) == 0; }
  // Blocking, until there are none.
  void wait() const noexcept;

 private:
  std::atomic<int> count_{0};
};

// The copies into one slab.
class SlabCopies {
 public:
  // Throws what the first copy that failed did.
  void check() const;
  void wait() const noexcept { count_.wait(); }

 private:
  friend class CudaCopyQueue;
  void fail(const std::exception_ptr& error) noexcept;

  CopyCount count_;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

struct Copy {
  cuda::DevicePointer to;
  const std::byte* from;  // pinned
  std::size_t nbytes;
  CopyCount* slot;  // where `from` lies; outlives the queue
  std::shared_ptr<SlabCopies> slab;
};

class CudaCopyQueue {
 public:
  explicit CudaCopyQueue(CudaDevice& device);
  CudaCopyQueue(const CudaCopyQueue&) = delete;
  CudaCopyQueue& operator=(const CudaCopyQueue&) = delete;
  // After all copies that were added.
  ~CudaCopyQueue();

  // Copy as soon as may be.  Thread-safe; not blocking.
  void add(Copy copy);

 private:
  struct Batch {
    std::vector<Copy> copies;
    CudaEvent done;
  };

  void run() noexcept;
  // What follows is for the thread alone.
  // The oldest that are ready, as many as a batch takes; the caller holds the mutex.
  void take_ready(Batch& batch) noexcept;
  void submit(Batch& batch) noexcept;
  void copy(const std::vector<Copy>& copies);
  // End the oldest batch if it has completed or failed; whether it has.
  bool reap(Batch& batch) noexcept;
  void fail(Batch& batch, const std::exception_ptr& error) noexcept;
  static void end(Batch& batch) noexcept;

  CudaDevice& device_;
  CudaStream stream_;
  std::array<Batch, 3> batches_;
  bool has_batches_;  // the driver takes several copies in one call
  std::vector<cuda::DevicePointer> targets_;
  std::vector<cuda::DevicePointer> sources_;
  std::vector<std::size_t> sizes_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_ending_ = false;
  std::deque<Copy> ready_;

  std::thread thread_;  // it uses all the others
};

}  // namespace changeover
