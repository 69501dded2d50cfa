#include "scratch_buffer.hpp"

#include <sys/mman.h>

#include <cerrno>

#include "error.hpp"

namespace changeover {

ScratchBuffer::ScratchBuffer(std::size_t nbytes) {
  void* address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw SystemError("mmap", errno);
  // A wish: fewer page faults and address translations where the kernel has huge pages.
  static_cast<void>(::madvise(address, nbytes, MADV_HUGEPAGE));
  bytes_ = {static_cast<std::byte*>(address), nbytes};
}

ScratchBuffer::~ScratchBuffer() { ::munmap(bytes_.data(), bytes_.size()); }

}  // namespace changeover
