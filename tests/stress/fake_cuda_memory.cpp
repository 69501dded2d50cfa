// The fake driver's device memory: allocations, addresses, and what is mapped where.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <iterator>

#include "check.hpp"
#include "fake_cuda_state.hpp"

using namespace changeover;
using namespace changeover::stress;
using cuda::Result;

namespace {

constexpr std::uint64_t kGranularityBytes = std::uint64_t{2} << 20;
constexpr const char* kName = "fake-device-memory-";  // and the device

bool overlaps(std::uint64_t address, std::uint64_t nbytes, std::uint64_t other, std::uint64_t other_nbytes) {
  return address < other + other_nbytes && other < address + nbytes;
}

Result mem_create(cuda::AllocationHandle* handle, std::size_t nbytes, const cuda::AllocationProperties* properties,
                  unsigned long long) {
  const int device = properties->location.id;
  CHECK(properties->type == cuda::kAllocationPinned && device >= 0 && device < kDevices);
  CHECK(nbytes % kGranularityBytes == 0);
  MAY_FAIL("cuMemCreate");
  std::uint64_t& free_bytes = s.free_bytes.at(static_cast<std::size_t>(device));
  if (nbytes > free_bytes) return cuda::kOutOfMemory;
  UniqueFd fd(::memfd_create((kName + std::to_string(device)).c_str(), MFD_CLOEXEC));
  CHECK(fd && ::ftruncate(fd.borrow(), static_cast<off_t>(nbytes)) == 0);
  free_bytes -= nbytes;
  // Counted as free again when the last handle and mapping are gone.
  std::shared_ptr<Physical> memory(new Physical{std::move(fd), nbytes, device}, [](Physical* last) {
    state().free_bytes.at(static_cast<std::size_t>(last->device)) += last->nbytes;
    delete last;
  });
  struct stat facts {};
  CHECK(::fstat(memory->fd.borrow(), &facts) == 0);
  s.allocations[facts.st_ino] = memory;
  *handle = s.next_id++;
  s.handles[*handle] = std::move(memory);
  return 0;
}
Result mem_release(cuda::AllocationHandle handle) {
  LOCKED;
  CHECK(s.handles.erase(handle) == 1);
  return 0;
}
Result mem_granularity(std::size_t* granularity, const cuda::AllocationProperties*, int) {
  return *granularity = kGranularityBytes, 0;
}
Result mem_properties(cuda::AllocationProperties* properties, cuda::AllocationHandle handle) {
  MAY_FAIL("cuMemGetAllocationPropertiesFromHandle");
  CHECK(s.handles.contains(handle));
  *properties = {};
  properties->location = {cuda::kLocationDevice, s.handles[handle]->device};
  return 0;
}
Result mem_export(void* fd, cuda::AllocationHandle handle, int, unsigned long long) {
  MAY_FAIL("cuMemExportToShareableHandle");
  CHECK(s.handles.contains(handle));
  *static_cast<int*>(fd) = ::dup(s.handles[handle]->fd.borrow());
  return 0;
}
Result mem_import(cuda::AllocationHandle* handle, void* os_handle, int) {
  MAY_FAIL("cuMemImportFromShareableHandle");
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  char target[64]{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(link.c_str(), target, sizeof target - 1) < 0) return cuda::kInvalidValue;
  const char* const name = std::strstr(target, kName);
  if (name == nullptr) return cuda::kInvalidValue;
  struct stat facts {};
  CHECK(::fstat(fd, &facts) == 0);
  // Of one allocation there is one, however many handles: its bytes are free when the last is gone.
  std::shared_ptr<Physical> memory = s.allocations[facts.st_ino].lock();
  if (!memory) {
    memory = std::make_shared<Physical>(UniqueFd(::dup(fd)), static_cast<std::uint64_t>(facts.st_size),
                                        name[std::strlen(kName)] - '0');
  }
  *handle = s.next_id++;
  s.handles[*handle] = std::move(memory);
  return 0;
}
Result address_reserve(cuda::DevicePointer* address, std::size_t nbytes, std::size_t, cuda::DevicePointer,
                       unsigned long long) {
  MAY_FAIL("cuMemAddressReserve");
  void* at = ::mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(at != MAP_FAILED);
  *address = reinterpret_cast<std::uint64_t>(at);
  s.reservations[*address] = nbytes;
  return 0;
}
Result address_free(cuda::DevicePointer address, std::size_t nbytes) {
  LOCKED;
  CHECK(s.reservations.contains(address) && s.reservations[address] == nbytes);
  const auto first = s.mappings.lower_bound(address);
  CHECK(first == s.mappings.end() || first->first >= address + nbytes);
  s.reservations.erase(address);
  CHECK(::munmap(as_pointer(address), nbytes) == 0);
  return 0;
}
Result mem_map(cuda::DevicePointer address, std::size_t nbytes, std::size_t, cuda::AllocationHandle handle,
               unsigned long long) {
  MAY_FAIL("cuMemMap");
  CHECK(s.handles.contains(handle));
  const auto memory = s.handles[handle];
  if (nbytes > memory->nbytes) return cuda::kInvalidValue;
  const auto next = s.mappings.lower_bound(address);
  CHECK(next == s.mappings.end() || next->first >= address + nbytes);
  CHECK(::mmap(as_pointer(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd.borrow(), 0) !=
        MAP_FAILED);
  s.mappings[address] = {memory, nbytes, {}};
  return 0;
}
Result mem_unmap(cuda::DevicePointer address, std::size_t nbytes) {
  LOCKED;
  CHECK(s.mappings.contains(address) && s.mappings[address].nbytes == nbytes);
  for (const Work& work : s.pending) {
    CHECK(!overlaps(work.address, work.nbytes, address, nbytes));
    CHECK(!overlaps(reinterpret_cast<std::uint64_t>(work.source), work.nbytes, address, nbytes));
  }
  s.mappings.erase(address);
  CHECK(::mmap(as_pointer(address), nbytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED);
  return 0;
}
Result set_access(cuda::DevicePointer address, std::size_t nbytes, const cuda::AccessDescription* description,
                  std::size_t count) {
  CHECK(count == 1 && description->location.id >= 0 && description->location.id < kDevices);
  MAY_FAIL("cuMemSetAccess");
  const auto device = static_cast<std::size_t>(description->location.id);
  for (std::uint64_t at = address; at < address + nbytes; at += s.mappings[at].nbytes) {
    CHECK(s.mappings.contains(at));
    const Mapped& mapped = s.mappings[at];
    const bool is_own = mapped.memory->device == description->location.id;
    // This code has no business in letting a device write to another's memory.
    CHECK(is_own || (s.has_peer_access && description->flags == cuda::kAccessRead));
    s.mappings[at].access.at(device) = description->flags;
  }
  const int protection = description->flags == cuda::kAccessReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  CHECK(::mprotect(as_pointer(address), nbytes, protection) == 0);
  return 0;
}

}  // namespace

namespace changeover::stress {

int access_to(State& s, std::uint64_t address, std::uint64_t nbytes, int device) {
  const auto after = s.mappings.upper_bound(address);
  CHECK(after != s.mappings.begin());
  const auto& [start, mapped] = *std::prev(after);
  CHECK(address + nbytes <= start + mapped.nbytes);
  return mapped.access.at(static_cast<std::size_t>(device));
}

Entries memory_entries() {
  return {
      {"cuMemCreate", erased(&mem_create)},
      {"cuMemRelease", erased(&mem_release)},
      {"cuMemGetAllocationGranularity", erased(&mem_granularity)},
      {"cuMemGetAllocationPropertiesFromHandle", erased(&mem_properties)},
      {"cuMemExportToShareableHandle", erased(&mem_export)},
      {"cuMemImportFromShareableHandle", erased(&mem_import)},
      {"cuMemAddressReserve", erased(&address_reserve)},
      {"cuMemAddressFree", erased(&address_free)},
      {"cuMemMap", erased(&mem_map)},
      {"cuMemUnmap", erased(&mem_unmap)},
      {"cuMemSetAccess", erased(&set_access)},
  };
}

}  // namespace changeover::stress
