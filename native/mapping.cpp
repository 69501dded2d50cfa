#include "mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "error.hpp"

namespace changeover {

Mapping::Mapping(int borrow_fd, std::uint64_t nbytes, Access access) : nbytes_(nbytes), access_(access) {
  if (nbytes == 0 || nbytes > SIZE_MAX / 2) {
    throw Misuse("a mapping cannot have " + std::to_string(nbytes) + " bytes");
  }
  const int protection = access == Access::read_write ? PROT_READ | PROT_WRITE : PROT_READ;
  // At a multiple of the huge page size, or huge pages could not be mapped as such: room for it is taken,
  // the file is mapped over its aligned part, and the rest is given back.
  const std::uint64_t room = nbytes + kHugePageBytes;
  void* const taken = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) throw SystemError("mmap", errno);
  auto* const first = static_cast<std::byte*>(taken);
  const std::uint64_t skipped = -reinterpret_cast<std::uintptr_t>(first) % kHugePageBytes;
  std::byte* const aligned = first + skipped;
  if (::mmap(aligned, nbytes, protection, MAP_SHARED | MAP_FIXED, borrow_fd, 0) == MAP_FAILED) {
    const int number = errno;
    ::munmap(taken, room);
    throw SystemError("mmap", number);
  }
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t used = (nbytes + page - 1) / page * page;
  if (skipped > 0) ::munmap(first, skipped);
  if (skipped + used < room) ::munmap(aligned + used, room - skipped - used);
  address_ = aligned;
}

Mapping::Mapping(Mapping&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      access_(other.access_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    unmap();
    address_ = std::exchange(other.address_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
    access_ = other.access_;
  }
  return *this;
}

Mapping::~Mapping() { unmap(); }

void Mapping::unmap() noexcept {
  if (address_ != nullptr) ::munmap(std::exchange(address_, nullptr), nbytes_);
}

void Mapping::check(std::uint64_t offset, std::uint64_t nbytes) const {
  // Written so that no sum can wrap.
  if (offset > nbytes_ || nbytes > nbytes_ - offset) {
    throw Misuse("bytes " + std::to_string(offset) + " + " + std::to_string(nbytes) +
                 " leave a mapping of " + std::to_string(nbytes_) + " bytes");
  }
}

std::span<const std::byte> Mapping::range(std::uint64_t offset, std::uint64_t nbytes) const {
  check(offset, nbytes);
  return {address_ + offset, nbytes};
}

std::span<std::byte> Mapping::writable_range(std::uint64_t offset, std::uint64_t nbytes) {
  if (access_ != Access::read_write) throw Misuse("a write to a read-only mapping");
  check(offset, nbytes);
  return {address_ + offset, nbytes};
}

}  // namespace changeover
