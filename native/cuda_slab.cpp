#include "cuda_slab.hpp"

#include <utility>
#include <vector>

#include "cuda_copy.hpp"
#include "cuda_digests.hpp"
#include "cuda_ipc_memory.hpp"
#include "cuda_release.hpp"
#include "error.hpp"

namespace changeover {
namespace {

// The last owner to close waits, so that memory is free when it says so.
void give_up(std::shared_ptr<CudaRegion> region) {
  ReleaseQueue& queue = region->device().releases();
  const std::weak_ptr<CudaRegion> watched = region;
  region.reset();
  if (watched.expired()) queue.settle();
}

}  // namespace

// --- CudaSlab ------------------------------------------------------------------------------------

CudaSlab::CudaSlab(UniqueFd fd, std::shared_ptr<CudaRegion> region)
    : nbytes_(region->nbytes()), fd_(std::move(fd)), region_(std::move(region)) {}

std::unique_ptr<CudaSlab> CudaSlab::import(Budget& budget, CudaDevice& device, const std::string& slab_id,
                                           std::uint64_t nbytes, UniqueFd take_fd) {
  if (nbytes == 0 || nbytes % device.granularity_bytes() != 0) {
    throw ForeignHandle("a slab of " + std::to_string(nbytes) + " bytes is not in whole steps of " +
                        std::to_string(device.granularity_bytes()));
  }
  std::unique_ptr<CudaRegion> region;
  if (CudaIpcImport::is_handle(take_fd.borrow())) {
    region = CudaIpcImport::open(budget, device, slab_id, nbytes, take_fd.borrow());
  } else {
    region = CudaMappedRegion::import(budget, device, slab_id, nbytes, take_fd.borrow());
  }
  return std::make_unique<CudaSlab>(std::move(take_fd), own(std::move(region)));
}

std::shared_ptr<const CudaRegion> CudaSlab::share() const {
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("use of a slab that is closed");
  return region_;
}

bool CudaSlab::is_open() const {
  const std::lock_guard lock(mutex_);
  return region_ != nullptr;
}

int CudaSlab::borrow_fd() const {
  const std::lock_guard lock(mutex_);
  if (!region_) throw Misuse("use of a slab that is closed");
  return fd_.borrow();
}

std::uint32_t CudaSlab::crc32(std::uint64_t offset, std::uint64_t nbytes) const {
  const auto region = share();
  return region->device().digests().crc32(region->range(offset, nbytes), nbytes);
}

void CudaSlab::check_range(std::uint64_t offset, std::uint64_t nbytes) const {
  static_cast<void>(share()->range(offset, nbytes));
}

void CudaSlab::digest(std::span<const SlabRange> ranges, std::uint64_t leaf_bytes, std::span<std::byte> leaves,
                      std::span<std::uint32_t> crcs, std::chrono::nanoseconds spread) const {
  const auto region = share();
  std::vector<DeviceRange> places;
  places.reserve(ranges.size());
  for (const SlabRange& range : ranges) {
    places.push_back({region->range(range.offset, range.nbytes), range.nbytes});
  }
  region->device().digests().digest(places, leaf_bytes, leaves, crcs, spread);
}

void CudaSlab::close() {
  std::shared_ptr<CudaRegion> last;
  {
    const std::lock_guard lock(mutex_);
    if (!region_) throw Misuse("a slab is closed twice");
    last = std::move(region_);
    fd_.reset();
  }
  give_up(std::move(last));
}

// --- WritableCudaSlab ----------------------------------------------------------------------------

// A read or copy under way: keeps the memory, and keeps `seal` away.
class WritableCudaSlab::Filling {
 public:
  explicit Filling(WritableCudaSlab& slab) : slab_(slab) {
    const std::lock_guard lock(slab.mutex_);
    if (!slab.region_) throw Misuse("a slab that is sealed or closed is filled");
    region_ = slab.region_;
    ++slab.fillings_;
  }
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;
  ~Filling() {
    // Closed meanwhile: this may be the last owner of memory that copies are under way to.
    if (!slab_.is_open()) slab_.copies_->wait();
    const std::lock_guard lock(slab_.mutex_);
    region_.reset();
    --slab_.fillings_;
  }

  const std::shared_ptr<CudaRegion>& region() const noexcept { return region_; }

 private:
  WritableCudaSlab& slab_;
  std::shared_ptr<CudaRegion> region_;
};

WritableCudaSlab::WritableCudaSlab(std::shared_ptr<CudaStaging> staging, std::shared_ptr<CudaRegion> region)
    : nbytes_(region->nbytes()), staging_(std::move(staging)), region_(std::move(region)) {}

WritableCudaSlab::~WritableCudaSlab() { copies_->wait(); }

std::unique_ptr<WritableCudaSlab> WritableCudaSlab::create(Budget& budget, std::shared_ptr<CudaStaging> staging,
                                                           const std::string& slab_id, std::uint64_t nbytes,
                                                           bool is_legacy_ipc) {
  CudaDevice& device = staging->device();
  if (nbytes == 0 || nbytes % device.granularity_bytes() != 0) {
    throw Misuse("a slab cannot have " + std::to_string(nbytes) + " bytes");
  }
  std::unique_ptr<CudaRegion> region;
  if (is_legacy_ipc || !device.has_posix_fds()) {
    region = CudaIpcMemory::create(budget, device, slab_id, nbytes);
  } else {
    region = CudaMappedRegion::create(budget, device, slab_id, nbytes);
  }
  return std::unique_ptr<WritableCudaSlab>(new WritableCudaSlab(std::move(staging), own(std::move(region))));
}

bool WritableCudaSlab::is_open() const {
  const std::lock_guard lock(mutex_);
  return region_ != nullptr;
}

void WritableCudaSlab::read_file(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces) {
  const Filling filling(*this);
  for (const Piece& piece : pieces) static_cast<void>(filling.region()->range(piece.offset, piece.nbytes));
  staging_->read_file(borrow_fd, file_offset, pieces, filling.region()->range(0, 0), copies_);
}

void WritableCudaSlab::copy_from(const CudaSlab& source) {
  const Filling filling(*this);
  CudaCopy::begin(source.share(), filling.region())->wait();
}

std::unique_ptr<CudaSlab> WritableCudaSlab::seal() {
  // Consumed from here on, also where a step below fails: what is moved out is freed by scope.
  std::shared_ptr<CudaRegion> region;
  {
    const std::lock_guard lock(mutex_);
    if (!region_) throw Misuse("a slab that is sealed or closed cannot be sealed");
    if (fillings_ > 0) throw Misuse("a slab cannot be sealed while it is filled");
    region = std::move(region_);
  }
  copies_->wait();
  copies_->check();
  UniqueFd fd = region->seal();
  return std::make_unique<CudaSlab>(std::move(fd), std::move(region));
}

void WritableCudaSlab::close() {
  std::shared_ptr<CudaRegion> last;
  {
    const std::lock_guard lock(mutex_);
    if (!region_) throw Misuse("a slab that is sealed or closed cannot be closed");
    last = std::move(region_);
  }
  copies_->wait();
  give_up(std::move(last));
}

}  // namespace changeover
