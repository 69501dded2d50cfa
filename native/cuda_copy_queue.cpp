#include "cuda_copy_queue.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "cuda_driver.hpp"
#include "error.hpp"

namespace changeover {
namespace {

// Between two looks at a batch: short against the 130 us that one takes.
constexpr std::chrono::microseconds kLookAgain{10};

// In a batch.  With three batches, half of the slots of 14 readers.
constexpr std::size_t kMostCopies = 14;

constexpr unsigned long kTimerSlackNs = 1000;

}  // namespace

void sleep_shortly() {
  // Of this thread, for good: else a sleep of 10 us takes 60.
  thread_local const int is_exact = ::prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  static_cast<void>(is_exact);
  std::this_thread::sleep_for(kLookAgain);
}

void CopyCount::wait() const noexcept {
  while (!is_zero()) sleep_shortly();
}

void SlabCopies::check() const {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void SlabCopies::fail(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
}

CudaCopyQueue::CudaCopyQueue(CudaDevice& device)
    : device_(device),
      stream_(device.least_priority()),
      has_batches_(static_cast<bool>(CudaDriver::get().copy_batch)) {
  // Here, for what takes and submits batches has nobody to throw to.
  for (Batch& batch : batches_) batch.copies.reserve(kMostCopies);
  targets_.reserve(kMostCopies);
  sources_.reserve(kMostCopies);
  sizes_.reserve(kMostCopies);
  thread_ = std::thread([this] { run(); });
}

CudaCopyQueue::~CudaCopyQueue() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CudaCopyQueue::add(Copy copy) {
  CopyCount& slot = *copy.slot;
  CopyCount& slab = copy.slab->count_;
  const std::lock_guard lock(mutex_);
  ready_.push_back(std::move(copy));
  slot.begin();
  slab.begin();
  changed_.notify_one();
}

void CudaCopyQueue::run() noexcept {
  std::size_t oldest = 0;
  std::size_t under_way = 0;
  for (;;) {
    bool has_copies = false;
    {
      std::unique_lock lock(mutex_);
      if (under_way == 0) changed_.wait(lock, [&] { return is_ending_ || !ready_.empty(); });
      if (under_way == 0 && ready_.empty()) return;
      if (under_way < batches_.size() && !ready_.empty()) {
        take_ready(batches_[(oldest + under_way) % batches_.size()]);
        has_copies = true;
      }
    }
    if (has_copies) {
      submit(batches_[(oldest + under_way++) % batches_.size()]);
    } else if (reap(batches_[oldest])) {
      oldest = (oldest + 1) % batches_.size();
      --under_way;
    } else {
      sleep_shortly();
    }
  }
}

void CudaCopyQueue::take_ready(Batch& batch) noexcept {
  const auto end = ready_.begin() + static_cast<std::ptrdiff_t>(std::min(ready_.size(), kMostCopies));
  batch.copies.assign(std::move_iterator(ready_.begin()), std::move_iterator(end));
  ready_.erase(ready_.begin(), end);
}

void CudaCopyQueue::submit(Batch& batch) noexcept {
  try {
    const ContextScope scope(device_);
    copy(batch.copies);
    batch.done.record(stream_.borrow());
  } catch (...) {
    fail(batch, std::current_exception());
  }
}

void CudaCopyQueue::copy(const std::vector<Copy>& copies) {
  const CudaDriver& driver = CudaDriver::get();
  if (has_batches_ && copies.size() > 1) {
    targets_.clear();
    sources_.clear();
    sizes_.clear();
    for (const Copy& each : copies) {
      targets_.push_back(each.to);
      sources_.push_back(reinterpret_cast<cuda::DevicePointer>(each.from));
      sizes_.push_back(each.nbytes);
    }
    cuda::CopyAttributes attributes{};
    attributes.source_access_order = cuda::kSourceAccessInStreamOrder;
    attributes.flags = cuda::kCopyPrefersOverlap;
    std::size_t first = 0;  // of those that have these attributes
    const cuda::Result result = driver.copy_batch.attempt(targets_.data(), sources_.data(), sizes_.data(),
                                                          copies.size(), &attributes, &first, 1, stream_.borrow());
    if (result == cuda::kSuccess) return;
    if (result != cuda::kNotSupported) driver.copy_batch.fail(result);
    has_batches_ = false;
  }
  for (const Copy& each : copies) driver.copy_to_device(each.to, each.from, each.nbytes, stream_.borrow());
}

bool CudaCopyQueue::reap(Batch& batch) noexcept {
  if (batch.copies.empty()) return true;  // it failed when it was submitted
  try {
    const ContextScope scope(device_);
    if (!batch.done.has_happened()) return false;
    end(batch);
  } catch (...) {
    fail(batch, std::current_exception());
  }
  return true;
}

void CudaCopyQueue::fail(Batch& batch, const std::exception_ptr& error) noexcept {
  // Some of it may still run, and must not when its memory is used for something else.  Where this fails too,
  // the context is lost, and with it all work.
  try {
    const ContextScope scope(device_);
    stream_.synchronize();
  } catch (const SystemError&) {
  }
  for (const Copy& each : batch.copies) each.slab->fail(error);
  end(batch);
}

void CudaCopyQueue::end(Batch& batch) noexcept {
  for (const Copy& each : batch.copies) {
    each.slot->end();
    each.slab->count_.end();
  }
  batch.copies.clear();
}

}  // namespace changeover
