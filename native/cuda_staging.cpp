#include "cuda_staging.hpp"

#include <algorithm>
#include <utility>

#include "crc32.hpp"
#include "cuda_driver.hpp"
#include "cuda_event.hpp"
#include "cuda_stream.hpp"
#include "error.hpp"
#include "file_reader.hpp"
#include "pinned_buffer.hpp"

namespace changeover {

struct CudaStaging::Lane {
  struct Slot {
    explicit Slot(std::uint64_t nbytes) : buffer(nbytes) {}
    CudaEvent copied;
    PinnedBuffer buffer;
  };

  Lane(int priority, std::uint64_t slot_bytes, std::size_t slot_count) : stream(priority) {
    slots.reserve(slot_count);
    for (std::size_t i = 0; i < slot_count; ++i) slots.emplace_back(slot_bytes);
  }
  Slot& next_slot() noexcept { return slots[next++ % slots.size()]; }

  CudaStream stream;
  std::vector<Slot> slots;
  std::size_t next = 0;
};

// A lane for the length of a read.
class CudaStaging::Lease {
 public:
  explicit Lease(CudaStaging& staging) : staging_(staging), lane_(take(staging)) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    const std::lock_guard lock(staging_.mutex_);
    staging_.idle_.push_back(&lane_);  // never grows: there is room for every lane
  }
  Lane& lane() const noexcept { return lane_; }

 private:
  static Lane& take(CudaStaging& staging) {
    {
      const std::lock_guard lock(staging.mutex_);
      if (!staging.idle_.empty()) {
        Lane& lane = *staging.idle_.back();
        staging.idle_.pop_back();
        return lane;
      }
    }
    // Not under the lock: pinning takes milliseconds.
    auto made = std::make_unique<Lane>(staging.device_.least_priority(), staging.slot_bytes_,
                                       staging.slots_per_lane_);
    const std::lock_guard lock(staging.mutex_);
    staging.idle_.reserve(staging.lanes_.size() + 1);
    staging.lanes_.push_back(std::move(made));
    return *staging.lanes_.back();
  }

  CudaStaging& staging_;
  Lane& lane_;
};

CudaStaging::CudaStaging(CudaDevice& device, std::uint64_t slot_bytes, std::size_t slots_per_lane)
    : device_(device), slot_bytes_(slot_bytes), slots_per_lane_(slots_per_lane) {
  if (slot_bytes == 0 || slots_per_lane < 2) throw Misuse("a lane has at least two slots of at least one byte");
}

CudaStaging::~CudaStaging() {
  try {
    const ContextScope scope(device_);
    // Pinned memory must not go while the device reads it.
    for (const auto& lane : lanes_) {
      static_cast<void>(CudaDriver::get().stream_synchronize.attempt(lane->stream.borrow()));
    }
    lanes_.clear();
  } catch (const SystemError&) {
    // The context is lost, and with it all work; the lanes go with the members.
  }
}

std::uint32_t CudaStaging::read_file(int borrow_fd, std::uint64_t file_offset, cuda::DevicePointer to,
                                     std::uint64_t nbytes) {
  if (nbytes == 0) return changeover::read_file(borrow_fd, file_offset, {});
  const ContextScope scope(device_);
  const Lease lease(*this);
  Lane& lane = lease.lane();
  std::uint32_t crc = 0;
  while (nbytes > 0) {
    Lane::Slot& slot = lane.next_slot();
    slot.copied.synchronize();
    const auto chunk = slot.buffer.bytes().first(std::min(nbytes, slot_bytes_));
    const std::uint32_t chunk_crc = changeover::read_file(borrow_fd, file_offset, chunk);
    crc = crc32_combine(crc, chunk_crc, chunk.size());
    CudaDriver::get().copy_to_device(to, chunk.data(), chunk.size(), lane.stream.borrow());
    slot.copied.record(lane.stream.borrow());
    file_offset += chunk.size();
    to += chunk.size();
    nbytes -= chunk.size();
  }
  return crc;
}

void CudaStaging::settle() {
  std::vector<Lane*> lanes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& lane : lanes_) lanes.push_back(lane.get());
  }
  const ContextScope scope(device_);
  for (const Lane* lane : lanes) lane->stream.synchronize();
}

}  // namespace changeover
