#include "host_slab.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "crc32.hpp"
#include "error.hpp"
#include "host_staging.hpp"
#include "memfd_pages.hpp"
#include "sha256.hpp"

// Linux 6.3; missing from the C library's headers of some supported systems.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace changeover {
namespace {

// Whose pages are taken in one go: the kernel drains all its processors' lists of pages each time.
constexpr std::uint64_t kBlockBytes = std::uint64_t{32} << 20;

UniqueFd create_memfd() {
  constexpr const char* kName = "changeover-slab";
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create(kName, kFlags | MFD_NOEXEC_SEAL));
  // An older kernel does not know the flag; weights are not executed either way.
  if (!fd && errno == EINVAL) fd = UniqueFd(::memfd_create(kName, kFlags));
  if (!fd) throw SystemError("memfd_create", errno);
  return fd;
}

void add_seals(int fd, int seals) {
  if (::fcntl(fd, F_ADD_SEALS, seals) != 0) throw SystemError("fcntl(F_ADD_SEALS)", errno);
}

// Another open file description of the same memory which cannot write.
UniqueFd reopen_read_only(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd read_only(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only) throw SystemError("open(" + path + ")", errno);
  return read_only;
}

void check_foreign(int fd, std::uint64_t nbytes) {
  // Only a memfd that was created for it can carry these seals, so they prove the type as well.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    if (errno == EINVAL) throw ForeignHandle("the fd is not a memfd");
    throw SystemError("fcntl(F_GET_SEALS)", errno);
  }
  if ((seals & F_SEAL_GROW) == 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw ForeignHandle("the memfd is not sealed against resizing");
  }
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) == 0) {
    throw ForeignHandle("the memfd is not sealed against writing");
  }
  if ((seals & F_SEAL_SEAL) == 0) throw ForeignHandle("the memfd's seals are not final");

  struct stat facts {};
  if (::fstat(fd, &facts) != 0) throw SystemError("fstat", errno);
  if (static_cast<std::uint64_t>(facts.st_size) != nbytes) {
    throw ForeignHandle("the memfd has " + std::to_string(facts.st_size) + " bytes, expected " +
                        std::to_string(nbytes));
  }
}

}  // namespace

// --- HostSlab ------------------------------------------------------------------------------------

HostSlab::HostSlab(UniqueFd fd, std::shared_ptr<const Region> region)
    : nbytes_(region->mapping.nbytes()), fd_(std::move(fd)), region_(std::move(region)) {}

std::unique_ptr<HostSlab> HostSlab::import(Budget& budget, const std::string& slab_id, std::uint64_t nbytes,
                                           UniqueFd take_fd) {
  check_foreign(take_fd.borrow(), nbytes);
  const int flags = ::fcntl(take_fd.borrow(), F_GETFL);
  if (flags < 0) throw SystemError("fcntl(F_GETFL)", errno);
  if ((flags & O_ACCMODE) != O_RDONLY) take_fd = reopen_read_only(take_fd.borrow());
  Mapping mapping(take_fd.borrow(), nbytes, Access::read_only);
  auto region = std::make_shared<const Region>(budget.adopt(slab_id, nbytes), std::move(mapping));
  return std::make_unique<HostSlab>(std::move(take_fd), std::move(region));
}

std::shared_ptr<const Region> HostSlab::share() const {
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("use of a slab that is closed");
  return region_;
}

bool HostSlab::is_open() const {
  const std::lock_guard lock(mutex_);
  return region_ != nullptr;
}

int HostSlab::borrow_fd() const {
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("use of a slab that is closed");
  return fd_.borrow();
}

void HostSlab::check_range(std::uint64_t offset, std::uint64_t nbytes) const {
  static_cast<void>(share()->mapping.range(offset, nbytes));
}

std::uint32_t HostSlab::crc32(std::uint64_t offset, std::uint64_t nbytes) const {
  const auto region = share();
  return changeover::crc32(region->mapping.range(offset, nbytes));
}

void HostSlab::digest(std::span<const SlabRange> ranges, std::uint64_t leaf_bytes, std::span<std::byte> leaves,
                      std::span<std::uint32_t> crcs, std::chrono::nanoseconds) const {
  const auto region = share();
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto bytes = region->mapping.range(ranges[i].offset, ranges[i].nbytes);
    const auto here = leaves.first(leaf_count(bytes.size(), leaf_bytes) * kSha256Bytes);
    if (crcs.empty()) {
      sha256_leaves(bytes, leaf_bytes, here, best_sha_isa());
    } else {
      crcs[i] = sha256_leaves_and_crc32(bytes, leaf_bytes, here, 0, best_sha_isa());
    }
    leaves = leaves.subspan(here.size());
  }
}

void HostSlab::close() {
  std::shared_ptr<const Region> last;  // unmapped after the lock is given up
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("a slab is closed twice");
  last = std::move(region_);
  fd_.reset();
}

// --- WritableHostSlab ----------------------------------------------------------------------------

// A read under way: keeps the memory, and keeps `seal` away.
class WritableHostSlab::Reading {
 public:
  explicit Reading(WritableHostSlab& slab) : slab_(slab) {
    const std::lock_guard lock(slab.mutex_);
    if (!slab.memory_) throw Misuse("a read into a slab that is sealed or closed");
    memory_ = slab.memory_;
    ++slab.readings_;
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading() {
    const std::lock_guard lock(slab_.mutex_);
    memory_.reset();
    --slab_.readings_;
  }

  Memory& memory() const noexcept { return *memory_; }

 private:
  WritableHostSlab& slab_;
  std::shared_ptr<Memory> memory_;
};

WritableHostSlab::WritableHostSlab(Memory memory)
    : nbytes_(memory.region.mapping.nbytes()),
      blocks_((nbytes_ + kBlockBytes - 1) / kBlockBytes, Block::missing),
      memory_(std::make_shared<Memory>(std::move(memory))) {}

std::unique_ptr<WritableHostSlab> WritableHostSlab::create(Budget& budget, const std::string& slab_id,
                                                           std::uint64_t nbytes) {
  if (nbytes == 0 || nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    throw Misuse("a slab cannot have " + std::to_string(nbytes) + " bytes");
  }
  Reservation reservation = budget.reserve(slab_id, nbytes);
  UniqueFd fd = create_memfd();
  if (::ftruncate(fd.borrow(), static_cast<off_t>(nbytes)) != 0) throw SystemError("ftruncate", errno);
  Mapping mapping(fd.borrow(), nbytes, Access::read_write);
  add_seals(fd.borrow(), F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE);
  Memory memory{Region{std::move(reservation), std::move(mapping)}, std::move(fd)};
  return std::unique_ptr<WritableHostSlab>(new WritableHostSlab(std::move(memory)));
}

bool WritableHostSlab::is_open() const {
  const std::lock_guard lock(mutex_);
  return memory_ != nullptr;
}

std::uint64_t WritableHostSlab::missing_bytes() const {
  const std::lock_guard lock(mutex_);
  return nbytes_ - taken_bytes_;
}

void WritableHostSlab::read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces) {
  const Reading reading(*this);
  Memory& memory = reading.memory();
  for (const Piece& piece : pieces) static_cast<void>(memory.region.mapping.range(piece.offset, piece.nbytes));
  for (const Piece& piece : pieces) take_blocks(memory, piece.offset, piece.nbytes);
  host_staging::read_file(borrow_fd, file_offset, pieces, memory.region.mapping.writable_range(0, nbytes_));
}

void WritableHostSlab::take_blocks(const Memory& memory, std::uint64_t offset, std::uint64_t nbytes) {
  if (nbytes == 0) return;
  for (std::uint64_t index = offset / kBlockBytes; index <= (offset + nbytes - 1) / kBlockBytes; ++index) {
    Block& block = blocks_[index];
    std::unique_lock lock(mutex_);
    // One thread takes a block's pages; who needs them as well waits for it.
    has_taken_.wait(lock, [&] { return block != Block::being_taken; });
    if (block == Block::taken) continue;
    block = Block::being_taken;
    lock.unlock();
    const std::uint64_t start = index * kBlockBytes;
    const std::uint64_t size = std::min(kBlockBytes, nbytes_ - start);
    struct Answer {  // also where the pages cannot be had: the next thread tries again and says so too
      WritableHostSlab& slab;
      Block& block;
      std::uint64_t taken_bytes = 0;
      ~Answer() {
        {
          const std::lock_guard relocked(slab.mutex_);
          block = taken_bytes > 0 ? Block::taken : Block::missing;
          slab.taken_bytes_ += taken_bytes;
        }
        slab.has_taken_.notify_all();
      }
    } answer{*this, block};
    take_pages(memory.region.mapping, memory.fd.borrow(), start, size);
    answer.taken_bytes = size;
  }
}

std::unique_ptr<HostSlab> WritableHostSlab::seal() {
  std::shared_ptr<Memory> memory;
  {
    const std::lock_guard lock(mutex_);
    if (!memory_) throw Misuse("a slab that is sealed or closed cannot be sealed");
    if (readings_ > 0) throw Misuse("a slab cannot be sealed while it is read into");
    // Consumed from here on, also where a step below fails: what is moved out is freed by scope.
    memory = std::move(memory_);
  }
  take_blocks(*memory, 0, nbytes_);  // those that nothing was read into
  { const Mapping unmapped = std::move(memory->region.mapping); }
  add_seals(memory->fd.borrow(), F_SEAL_WRITE | F_SEAL_SEAL);
  UniqueFd read_only = reopen_read_only(memory->fd.borrow());
  Mapping mapping(read_only.borrow(), nbytes_, Access::read_only);
  auto region = std::make_shared<const Region>(std::move(memory->region.reservation), std::move(mapping));
  return std::make_unique<HostSlab>(std::move(read_only), std::move(region));
}

void WritableHostSlab::close() {
  std::shared_ptr<Memory> last;  // unmapped after the lock is given up
  const std::lock_guard lock(mutex_);
  if (!memory_) throw Misuse("a slab that is sealed or closed cannot be closed");
  last = std::move(memory_);
}

}  // namespace changeover
