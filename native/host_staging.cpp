#include "host_staging.hpp"

#include <cstring>
#include <memory>

#include "lane_pool.hpp"
#include "read_queue.hpp"
#include "scratch_buffer.hpp"

namespace changeover::host_staging {
namespace {

constexpr unsigned kSlots = 4;
constexpr std::uint64_t kChunkBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kSlotBytes = kChunkBytes + kSlotMarginBytes;

class MemorySlots final : public Slots {
 public:
  unsigned count() const noexcept override { return kSlots; }
  std::uint64_t chunk_bytes() const noexcept override { return kChunkBytes; }
  bool is_free(unsigned) const noexcept override { return true; }
  void wait_a_moment() override {}
  std::span<std::byte> reuse(unsigned slot) override {
    return buffer_.bytes().subspan(slot * kSlotBytes, kSlotBytes);
  }
  std::span<std::byte> in_place(std::uint64_t offset, std::uint64_t nbytes) override {
    return memory.subspan(offset, nbytes);
  }
  void place(unsigned, std::span<const std::byte> bytes, std::uint64_t offset) override {
    std::memcpy(memory.data() + offset, bytes.data(), bytes.size());
  }

  std::span<std::byte> memory;

 private:
  ScratchBuffer buffer_{kSlots * kSlotBytes};  // takes pages when it is used
};

struct Lane {
  MemorySlots slots;
  ReadQueue queue{kSlots};
  ExtentReader reader{queue, slots};
};

// For good: a thread may read until the process ends.
LanePool<Lane>& lanes() {
  static auto* const pool = new LanePool<Lane>;
  return *pool;
}

}  // namespace

void read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces, std::span<std::byte> memory) {
  const LanePool<Lane>::Lease lane(lanes(), [] { return std::make_unique<Lane>(); });
  lane->slots.memory = memory;
  lane->reader.read(borrow_fd, file_offset, pieces);
}

}  // namespace changeover::host_staging
