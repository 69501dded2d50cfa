#include "cuda_staging.hpp"

#include <string>
#include <vector>

#include "error.hpp"
#include "pinned_buffer.hpp"
#include "read_queue.hpp"

namespace changeover {
namespace {

// Pinned slots, and copies out of them.
class PinnedSlots final : public Slots {
 public:
  PinnedSlots(CudaCopyQueue& queue, std::uint64_t slot_bytes, unsigned slot_count)
      : queue_(queue),
        chunk_bytes_(slot_bytes),
        slot_bytes_(slot_bytes + kSlotMarginBytes),
        buffer_(slot_count * slot_bytes_),
        copies_(slot_count) {}

  unsigned count() const noexcept override { return static_cast<unsigned>(copies_.size()); }
  std::uint64_t chunk_bytes() const noexcept override { return chunk_bytes_; }
  bool is_free(unsigned slot) const noexcept override { return copies_[slot].is_zero(); }
  void wait_a_moment() override { sleep_shortly(); }
  std::span<std::byte> reuse(unsigned slot) override {
    return buffer_.bytes().subspan(slot * slot_bytes_, slot_bytes_);
  }
  std::span<std::byte> in_place(std::uint64_t, std::uint64_t) override { return {}; }
  void place(unsigned slot, std::span<const std::byte> bytes, std::uint64_t offset) override {
    queue_.add({target + offset, bytes.data(), bytes.size(), &copies_[slot], slab});
  }

  cuda::DevicePointer target = 0;
  std::shared_ptr<SlabCopies> slab;

 private:
  CudaCopyQueue& queue_;
  const std::uint64_t chunk_bytes_;
  const std::uint64_t slot_bytes_;  // a multiple of kDirectAlignment where chunks are
  PinnedBuffer buffer_;
  std::vector<CopyCount> copies_;  // out of each slot
};

}  // namespace

struct CudaStaging::Lane {
  Lane(CudaCopyQueue& copies, std::uint64_t slot_bytes, unsigned slot_count)
      : slots(copies, slot_bytes, slot_count), queue(slot_count), reader(queue, slots) {}

  PinnedSlots slots;
  ReadQueue queue;
  ExtentReader reader;
};

CudaStaging::CudaStaging(CudaDevice& device, std::uint64_t slot_bytes, unsigned slots_per_lane)
    : device_(device),
      slot_bytes_(slot_bytes),
      slots_per_lane_(slots_per_lane),
      lanes_(std::make_unique<LanePool<Lane>>()) {
  if (slot_bytes == 0 || slot_bytes % kDirectAlignment != 0 || slots_per_lane < 2) {
    throw Misuse("a lane has at least two slots of whole blocks of " + std::to_string(kDirectAlignment) + " bytes");
  }
  const ContextScope scope(device_);
  copies_ = std::make_unique<CudaCopyQueue>(device_);
}

CudaStaging::~CudaStaging() {
  try {
    const ContextScope scope(device_);
    copies_.reset();  // pinned memory must not go while the device reads it
    lanes_.reset();
  } catch (const SystemError&) {
    // The context is lost, and with it all work; what is left goes with the members.
  }
}

void CudaStaging::read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces,
                            cuda::DevicePointer to, const std::shared_ptr<SlabCopies>& copies) {
  copies->check();
  const LanePool<Lane>::Lease lane(*lanes_, [this] {
    const ContextScope scope(device_);
    return std::make_unique<Lane>(*copies_, slot_bytes_, slots_per_lane_);
  });
  lane->slots.target = to;
  lane->slots.slab = copies;
  lane->reader.read(borrow_fd, file_offset, pieces);
}

}  // namespace changeover
