// `PinnedBuffer`: host memory that the device reads and writes directly, at the same address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

class PinnedBuffer {
 public:
  // In the current context.  Slow (pages are taken and locked): allocate once and keep.
  explicit PinnedBuffer(std::uint64_t nbytes);
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&&) = delete;
  // The device must be done with it.
  ~PinnedBuffer();

  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace changeover
