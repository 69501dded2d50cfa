#include "cuda_ipc_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "cuda_driver.hpp"
#include "cuda_release.hpp"
#include "error.hpp"

namespace changeover {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_WRITE | F_SEAL_SEAL;
constexpr char kMagic[16] = "changeover-ipc1";

// What the memfd holds.  Both ends run on one machine, so the numbers need no byte order.
struct Ticket {
  char magic[16];
  char uuid[48];
  std::uint64_t nbytes;
  cuda::IpcHandle handle;
};
static_assert(sizeof(Ticket) == 136);

UniqueFd write_ticket(const Ticket& ticket) {
  UniqueFd fd(::memfd_create("changeover-ipc", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw SystemError("memfd_create", errno);
  const ssize_t written = ::write(fd.borrow(), &ticket, sizeof ticket);
  if (written != static_cast<ssize_t>(sizeof ticket)) throw SystemError("write", written < 0 ? errno : EIO);
  if (::fcntl(fd.borrow(), F_ADD_SEALS, kSeals) != 0) throw SystemError("fcntl(F_ADD_SEALS)", errno);
  return fd;
}

Ticket read_ticket(int fd) {
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) throw SystemError("fstat", errno);
  Ticket ticket{};
  if (static_cast<std::uint64_t>(facts.st_size) != sizeof ticket ||
      ::pread(fd, &ticket, sizeof ticket, 0) != static_cast<ssize_t>(sizeof ticket) ||
      std::memcmp(ticket.magic, kMagic, sizeof kMagic) != 0) {
    throw ForeignHandle("the memfd is not a handle of CUDA IPC memory");
  }
  return ticket;
}

// A call that needs the context, in a destructor: it fails only where the context is lost or the
// process ends, and then the memory is gone already.
void quietly(CudaDevice& device, const DriverCall<cuda::DevicePointer>& call, cuda::DevicePointer address) noexcept {
  try {
    const ContextScope scope(device);
    static_cast<void>(call.attempt(address));
  } catch (const SystemError&) {
    return;
  }
}

}  // namespace

CudaIpcMemory::CudaIpcMemory(CudaDevice& device, Reservation share, cuda::DevicePointer take_address,
                             std::uint64_t nbytes)
    : CudaRegion(device), share_(std::move(share)), address_(take_address), nbytes_(nbytes) {}

std::unique_ptr<CudaIpcMemory> CudaIpcMemory::create(Budget& budget, CudaDevice& device,
                                                     const std::string& slab_id, std::uint64_t nbytes) {
  Reservation share = budget.reserve(slab_id, nbytes);
  const ContextScope scope(device);
  // Made first, so that nothing between the allocation and its owner can fail.
  std::unique_ptr<CudaIpcMemory> memory(new CudaIpcMemory(device, std::move(share), 0, nbytes));
  const CudaDriver& driver = CudaDriver::get();
  cuda::Result result = driver.mem_alloc.attempt(&memory->address_, nbytes);
  if (result == cuda::kOutOfMemory) {
    device.releases().settle();  // memory on its way back counts as free
    result = driver.mem_alloc.attempt(&memory->address_, nbytes);
  }
  if (result == cuda::kOutOfMemory) {
    throw DeviceMemoryExceeded("a slab on " + device.uuid(), nbytes, device.memory().free_bytes);
  }
  if (result != cuda::kSuccess) driver.mem_alloc.fail(result);
  return memory;
}

CudaIpcMemory::~CudaIpcMemory() {
  if (address_ != 0) quietly(device(), CudaDriver::get().mem_free, address_);
}

UniqueFd CudaIpcMemory::seal() {
  const ContextScope scope(device());
  Ticket ticket{};
  std::memcpy(ticket.magic, kMagic, sizeof kMagic);
  device().uuid().copy(ticket.uuid, sizeof ticket.uuid - 1);
  ticket.nbytes = nbytes_;
  CudaDriver::get().ipc_get_handle(&ticket.handle, address_);
  return write_ticket(ticket);
}

CudaIpcImport::CudaIpcImport(CudaDevice& device, Reservation share, cuda::DevicePointer take_address,
                             std::uint64_t nbytes)
    : CudaRegion(device), share_(std::move(share)), address_(take_address), nbytes_(nbytes) {}

bool CudaIpcImport::is_handle(int borrow_fd) noexcept {
  const int seals = ::fcntl(borrow_fd, F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals;
}

std::unique_ptr<CudaIpcImport> CudaIpcImport::open(Budget& budget, CudaDevice& device,
                                                   const std::string& slab_id, std::uint64_t nbytes,
                                                   int borrow_fd) {
  const Ticket ticket = read_ticket(borrow_fd);
  const std::string uuid(ticket.uuid, ::strnlen(ticket.uuid, sizeof ticket.uuid));
  if (uuid != device.uuid() || ticket.nbytes != nbytes) {
    throw ForeignHandle("the handle is of " + std::to_string(ticket.nbytes) + " bytes on '" + uuid +
                        "', expected " + std::to_string(nbytes) + " on '" + device.uuid() + "'");
  }
  const ContextScope scope(device);
  std::unique_ptr<CudaIpcImport> memory(
      new CudaIpcImport(device, budget.adopt(slab_id, nbytes), 0, nbytes));
  const CudaDriver& driver = CudaDriver::get();
  driver.ipc_open_handle(&memory->address_, ticket.handle, cuda::kIpcLazyPeerAccess);
  // The ticket is only what a peer says; the driver knows the block.
  cuda::DevicePointer base = 0;
  std::size_t size = 0;
  driver.mem_get_range(&base, &size, memory->address_);
  if (base != memory->address_ || size < nbytes) {
    throw ForeignHandle("the block has " + std::to_string(size) + " bytes, expected " + std::to_string(nbytes));
  }
  return memory;
}

CudaIpcImport::~CudaIpcImport() {
  if (address_ != 0) quietly(device(), CudaDriver::get().ipc_close_handle, address_);
}

UniqueFd CudaIpcImport::seal() { throw Misuse("imported memory is sealed already"); }

}  // namespace changeover
