#include "cuda_staging.hpp"

#include <utility>
#include <vector>

#include "cuda_driver.hpp"
#include "cuda_event.hpp"
#include "cuda_stream.hpp"
#include "error.hpp"
#include "pinned_buffer.hpp"
#include "read_queue.hpp"

namespace changeover {
namespace {

// Pinned slots, and copies out of them on a stream.
class PinnedSlots final : public Slots {
 public:
  PinnedSlots(int priority, std::uint64_t slot_bytes, unsigned slot_count)
      : chunk_bytes_(slot_bytes), stream_(priority) {
    slots_.reserve(slot_count);
    for (unsigned i = 0; i < slot_count; ++i) slots_.emplace_back(slot_bytes + kSlotMarginBytes);
  }

  unsigned count() const noexcept override { return static_cast<unsigned>(slots_.size()); }
  std::uint64_t chunk_bytes() const noexcept override { return chunk_bytes_; }
  std::span<std::byte> reuse(unsigned slot) override {
    slots_[slot].copied.synchronize();
    return slots_[slot].buffer.bytes();
  }
  std::span<std::byte> in_place(std::uint64_t, std::uint64_t) override { return {}; }
  void place(std::span<const std::byte> bytes, std::uint64_t offset) override {
    CudaDriver::get().copy_to_device(target + offset, bytes.data(), bytes.size(), stream_.borrow());
  }
  void finish(unsigned slot) override { slots_[slot].copied.record(stream_.borrow()); }

  const CudaStream& stream() const noexcept { return stream_; }

  cuda::DevicePointer target = 0;

 private:
  struct Slot {
    explicit Slot(std::uint64_t nbytes) : buffer(nbytes) {}
    CudaEvent copied;
    PinnedBuffer buffer;
  };

  const std::uint64_t chunk_bytes_;
  CudaStream stream_;
  std::vector<Slot> slots_;
};

}  // namespace

struct CudaStaging::Lane {
  Lane(int priority, std::uint64_t slot_bytes, unsigned slot_count)
      : slots(priority, slot_bytes, slot_count), queue(slot_count), reader(queue, slots) {}

  PinnedSlots slots;
  ReadQueue queue;
  ExtentReader reader;
};

CudaStaging::CudaStaging(CudaDevice& device, std::uint64_t slot_bytes, unsigned slots_per_lane)
    : device_(device),
      slot_bytes_(slot_bytes),
      slots_per_lane_(slots_per_lane),
      lanes_(std::make_unique<LanePool<Lane>>()) {
  if (slot_bytes == 0 || slots_per_lane < 2) throw Misuse("a lane has at least two slots of at least one byte");
}

CudaStaging::~CudaStaging() {
  try {
    const ContextScope scope(device_);
    // Pinned memory must not go while the device reads it.
    for (const Lane* lane : lanes_->all()) {
      static_cast<void>(CudaDriver::get().stream_synchronize.attempt(lane->slots.stream().borrow()));
    }
    lanes_.reset();
  } catch (const SystemError&) {
    // The context is lost, and with it all work; the lanes go with the members.
  }
}

void CudaStaging::read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces,
                            cuda::DevicePointer to) {
  const ContextScope scope(device_);
  const LanePool<Lane>::Lease lane(*lanes_, [this] {
    return std::make_unique<Lane>(device_.least_priority(), slot_bytes_, slots_per_lane_);
  });
  lane->slots.target = to;
  lane->reader.read(borrow_fd, file_offset, pieces);
}

void CudaStaging::settle() {
  const std::vector<Lane*> lanes = lanes_->all();
  const ContextScope scope(device_);
  for (const Lane* lane : lanes) lane->slots.stream().synchronize();
}

}  // namespace changeover
