// `Mapping`: the one owner of a region of shared memory in this address space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

inline constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;

enum class Access { read_only, read_write };

class Mapping {
 public:
  // Map the first `nbytes` (> 0) of `borrow_fd` at a multiple of kHugePageBytes.  Throws SystemError.
  Mapping(int borrow_fd, std::uint64_t nbytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::uint64_t nbytes() const noexcept { return nbytes_; }

  // `nbytes` at `offset`.  Throws Misuse where the range leaves the mapping.
  std::span<const std::byte> range(std::uint64_t offset, std::uint64_t nbytes) const;
  // The same, to write to; only for Access::read_write.
  std::span<std::byte> writable_range(std::uint64_t offset, std::uint64_t nbytes);

 private:
  void check(std::uint64_t offset, std::uint64_t nbytes) const;
  void unmap() noexcept;

  std::byte* address_ = nullptr;
  std::uint64_t nbytes_ = 0;
  Access access_ = Access::read_only;
};

}  // namespace changeover
