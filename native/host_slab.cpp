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
#include "file_reader.hpp"
#include "sha256.hpp"

// Linux 6.3; missing from the C library's headers of some supported systems.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace changeover {
namespace {

constexpr std::uint64_t kAllocationStepBytes = std::uint64_t{16} << 20;

UniqueFd create_memfd() {
  constexpr const char* kName = "changeover-slab";
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create(kName, kFlags | MFD_NOEXEC_SEAL));
  // An older kernel does not know the flag; weights are not executed either way.
  if (!fd && errno == EINVAL) fd = UniqueFd(::memfd_create(kName, kFlags));
  if (!fd) throw SystemError("memfd_create", errno);
  return fd;
}

void allocate(int fd, std::uint64_t nbytes) {
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) throw SystemError("ftruncate", errno);
  // In steps: a call that a signal interrupts gives back all it had, so that a long one might never
  // end in a process with a periodic timer.
  for (std::uint64_t offset = 0; offset < nbytes;) {
    const std::uint64_t step = std::min(kAllocationStepBytes, nbytes - offset);
    if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(step)) == 0) {
      offset += step;
    } else if (errno != EINTR) {
      throw SystemError("fallocate", errno);
    }
  }
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

std::uint32_t HostSlab::crc32(std::uint64_t offset, std::uint64_t nbytes) const {
  const auto region = share();
  return changeover::crc32(region->mapping.range(offset, nbytes));
}

void HostSlab::sha256_leaves(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t leaf_bytes,
                             std::span<std::byte> digests) const {
  const auto region = share();
  changeover::sha256_leaves(region->mapping.range(offset, nbytes), leaf_bytes, digests, best_sha_isa());
}

void HostSlab::close() {
  std::shared_ptr<const Region> last;  // unmapped after the lock is given up
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("a slab is closed twice");
  last = std::move(region_);
  fd_.reset();
}

// --- WritableHostSlab ----------------------------------------------------------------------------

// A read under way: keeps the mapping, and keeps `seal` away.
class WritableHostSlab::Reading {
 public:
  explicit Reading(WritableHostSlab& slab) : slab_(slab) {
    const std::lock_guard lock(slab.mutex_);
    if (!slab.region_) throw Misuse("a read into a slab that is sealed or closed");
    region_ = slab.region_;
    ++slab.readings_;
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading() {
    const std::lock_guard lock(slab_.mutex_);
    region_.reset();
    --slab_.readings_;
  }

  Mapping& mapping() const noexcept { return region_->mapping; }

 private:
  WritableHostSlab& slab_;
  std::shared_ptr<Region> region_;
};

WritableHostSlab::WritableHostSlab(UniqueFd fd, Region region)
    : nbytes_(region.mapping.nbytes()),
      fd_(std::move(fd)),
      region_(std::make_shared<Region>(std::move(region))) {}

std::unique_ptr<WritableHostSlab> WritableHostSlab::create(Budget& budget, const std::string& slab_id,
                                                           std::uint64_t nbytes) {
  if (nbytes == 0 || nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    throw Misuse("a slab cannot have " + std::to_string(nbytes) + " bytes");
  }
  Reservation reservation = budget.reserve(slab_id, nbytes);
  UniqueFd fd = create_memfd();
  allocate(fd.borrow(), nbytes);
  Mapping mapping(fd.borrow(), nbytes, Access::read_write);
  add_seals(fd.borrow(), F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE);
  return std::unique_ptr<WritableHostSlab>(
      new WritableHostSlab(std::move(fd), Region{std::move(reservation), std::move(mapping)}));
}

bool WritableHostSlab::is_open() const {
  const std::lock_guard lock(mutex_);
  return region_ != nullptr;
}

std::uint32_t WritableHostSlab::read_file(int borrow_fd, std::uint64_t file_offset, std::uint64_t offset,
                                          std::uint64_t nbytes) {
  const Reading reading(*this);
  return changeover::read_file(borrow_fd, file_offset, reading.mapping().writable_range(offset, nbytes));
}

std::unique_ptr<HostSlab> WritableHostSlab::seal() {
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("a slab that is sealed or closed cannot be sealed");
  if (readings_ > 0) throw Misuse("a slab cannot be sealed while it is read into");
  // Consumed from here on, also where a step below fails: what is moved out is freed by scope.
  const std::shared_ptr<Region> writable = std::exchange(region_, nullptr);
  const UniqueFd fd = std::move(fd_);
  Reservation reservation = std::move(writable->reservation);
  { const Mapping unmapped = std::move(writable->mapping); }
  add_seals(fd.borrow(), F_SEAL_WRITE | F_SEAL_SEAL);
  UniqueFd read_only = reopen_read_only(fd.borrow());
  Mapping mapping(read_only.borrow(), nbytes_, Access::read_only);
  auto region = std::make_shared<const Region>(std::move(reservation), std::move(mapping));
  return std::make_unique<HostSlab>(std::move(read_only), std::move(region));
}

void WritableHostSlab::close() {
  std::shared_ptr<Region> last;  // unmapped after the lock is given up
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("a slab that is sealed or closed cannot be closed");
  last = std::move(region_);
  fd_.reset();
}

}  // namespace changeover
