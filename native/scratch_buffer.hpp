// `ScratchBuffer`: page-aligned memory of this process, allocated once and used again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

class ScratchBuffer {
 public:
  // Throws SystemError.
  explicit ScratchBuffer(std::size_t nbytes);
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;
  ~ScratchBuffer();

  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace changeover
