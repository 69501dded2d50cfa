#include "fake_cuda.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "cuda_api.hpp"
#include "unique_fd.hpp"

using namespace changeover;
using namespace changeover::stress;
using cuda::Result;

namespace {

constexpr std::uint64_t kGranularityBytes = std::uint64_t{2} << 20;
constexpr const char* kName = "fake-device-memory-";  // and the device
constexpr int kDevices = 2;
constexpr int kNotSupported = 801;

struct Physical {
  UniqueFd fd;
  std::uint64_t nbytes = 0;
  int device = 0;
};
struct Mapped {
  std::shared_ptr<Physical> memory;
  std::uint64_t nbytes = 0;
  std::array<int, kDevices> access{};
};
struct Work {
  std::uint64_t sequence;
  cuda::Stream stream;
  std::uint64_t address;
  std::uint64_t nbytes;
  const void* source;  // null where it only reads
};
struct EventState {
  std::uint64_t sequence = 0;
  cuda::Stream stream = nullptr;
  bool is_of_context = false;
};

struct State {
  std::mutex mutex;
  std::array<std::uint64_t, kDevices> free_bytes{std::uint64_t{1} << 30, std::uint64_t{1} << 30};
  bool has_peer_access = true;
  bool is_capturing = false;
  bool has_batches = true;
  bool is_stalled = false;
  std::vector<std::size_t> batches;  // copies in each, as they came
  std::uint64_t next_id = 1;
  std::uint64_t sequence = 0;
  std::map<cuda::AllocationHandle, std::shared_ptr<Physical>> handles;
  std::map<ino_t, std::weak_ptr<Physical>> allocations;  // what an fd is of
  std::map<std::uint64_t, std::uint64_t> reservations;
  std::map<std::uint64_t, Mapped> mappings;
  std::map<cuda::Event, EventState> events;
  std::map<cuda::Stream, int> streams;
  std::map<void*, std::size_t> pinned;
  std::vector<Work> pending;
  int call_in = 0;
  int call_result = 0;
  int calls = 0;
  std::map<std::string, std::pair<int, int>> entries;
};

State& state() {
  static State* const made = new State;
  return *made;
}

#define LOCKED                \
  State& s = state();         \
  const std::lock_guard lock(s.mutex)

// Of an entry point that can fail: whether it does now.
Result planned(State& s, const char* entry) {
  ++s.calls;
  if (s.call_in > 0 && --s.call_in == 0) return s.call_result;
  const auto found = s.entries.find(entry);
  if (found != s.entries.end() && --found->second.first == 0) {
    const Result result = found->second.second;
    s.entries.erase(found);
    return result;
  }
  return cuda::kSuccess;
}

#define MAY_FAIL(entry)                                     \
  LOCKED;                                                   \
  if (const Result result = planned(s, entry); result != 0) return result

thread_local std::vector<int> contexts;  // devices, the current one last

int current_device() {
  CHECK(!contexts.empty());
  return contexts.back();
}
int device_of(cuda::Context context) { return static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1; }

// Work for a stream is given by who has its device's context.
void check_stream(State& s, cuda::Stream stream) {
  CHECK(s.streams.contains(stream) && s.streams[stream] == current_device());
}

// What `device` may do to all of a range that lies in one mapping.
int access_to(State& s, std::uint64_t address, std::uint64_t nbytes, int device) {
  const auto after = s.mappings.upper_bound(address);
  CHECK(after != s.mappings.begin());
  const auto& [start, mapped] = *std::prev(after);
  CHECK(address + nbytes <= start + mapped.nbytes);
  return mapped.access.at(static_cast<std::size_t>(device));
}

bool overlaps(std::uint64_t address, std::uint64_t nbytes, std::uint64_t other, std::uint64_t other_nbytes) {
  return address < other + other_nbytes && other < address + nbytes;
}

void* as_pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void carry_out(State& s, const std::function<bool(const Work&)>& is_due) {
  std::vector<Work> later;
  for (const Work& work : s.pending) {
    if (!is_due(work)) {
      later.push_back(work);
    } else if (work.source != nullptr) {
      std::memcpy(as_pointer(work.address), work.source, work.nbytes);
    } else {
      volatile const unsigned char* const from = static_cast<unsigned char*>(as_pointer(work.address));
      static_cast<void>(from[0] + from[work.nbytes - 1]);
    }
  }
  s.pending = std::move(later);
}

// --- the driver's entry points ---------------------------------------------------------------------

Result init(unsigned) { return 0; }
Result driver_version(int* version) { return *version = 13000, 0; }
Result error_name(Result, const char** name) { return *name = "CUDA_ERROR_PLANTED", 0; }
Result error_string(Result, const char** words) { return *words = "planted", 0; }
Result device_count(int* count) { return *count = kDevices, 0; }
Result device_get(cuda::Device* device, int ordinal) { return *device = ordinal, 0; }
Result device_uuid(cuda::Uuid* uuid, cuda::Device device) {
  for (unsigned char i = 0; i < 16; ++i) uuid->bytes[i] = i;
  uuid->bytes[0] = static_cast<unsigned char>(device);
  return 0;
}
Result device_attribute(int* value, int, cuda::Device) { return *value = 1, 0; }
Result device_can_access_peer(int* can, cuda::Device device, cuda::Device other) {
  CHECK(device != other);
  MAY_FAIL("cuDeviceCanAccessPeer");
  return *can = s.has_peer_access ? 1 : 0, 0;
}
Result context_retain(cuda::Context* context, cuda::Device device) {
  return *context = reinterpret_cast<cuda::Context>(static_cast<std::intptr_t>(device) + 1), 0;
}
Result context_push(cuda::Context context) { return contexts.push_back(device_of(context)), 0; }
Result context_pop(cuda::Context*) {
  CHECK(!contexts.empty());
  return contexts.pop_back(), 0;
}
Result context_synchronize() {
  MAY_FAIL("cuCtxSynchronize");
  CHECK(!s.is_capturing);
  carry_out(s, [](const Work&) { return true; });
  return 0;
}
Result priority_range(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
Result context_record_event(cuda::Context, cuda::Event event) {
  LOCKED;
  CHECK(!s.is_capturing);  // the capture would be lost
  CHECK(s.events.contains(event));
  s.events[event] = {s.sequence, nullptr, true};
  return 0;
}

Result mem_info(std::size_t* free, std::size_t* total) {
  LOCKED;
  *free = s.free_bytes.at(static_cast<std::size_t>(current_device()));
  *total = std::uint64_t{1} << 30;
  return 0;
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

Result host_alloc(void** address, std::size_t nbytes, unsigned) {
  MAY_FAIL("cuMemHostAlloc");
  *address = ::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  s.pinned[*address] = nbytes;
  return 0;
}
Result host_free(void* address) {
  LOCKED;
  CHECK(s.pinned.contains(address));
  for (const Work& work : s.pending) {
    const auto* const source = static_cast<const char*>(work.source);
    const auto* const first = static_cast<const char*>(address);
    CHECK(source == nullptr || source < first || source >= first + s.pinned[address]);
  }
  s.pinned.erase(address);
  ::free(address);
  return 0;
}
Result copy_to_device(cuda::DevicePointer to, const void* from, std::size_t nbytes, cuda::Stream stream) {
  MAY_FAIL("cuMemcpyHtoDAsync");
  check_stream(s, stream);
  CHECK(access_to(s, to, nbytes, current_device()) == cuda::kAccessReadWrite);
  s.batches.push_back(1);
  s.pending.push_back({++s.sequence, stream, to, nbytes, from});
  return 0;
}
Result copy_batch(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* nbytes, std::size_t count,
                  cuda::CopyAttributes* attributes, std::size_t* first, std::size_t attribute_count,
                  cuda::Stream stream) {
  MAY_FAIL("cuMemcpyBatchAsync");
  if (!s.has_batches) return kNotSupported;
  CHECK(count > 0 && attribute_count == 1 && *first == 0);
  check_stream(s, stream);
  CHECK(attributes->source_access_order == cuda::kSourceAccessInStreamOrder);
  s.batches.push_back(count);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(access_to(s, to[i], nbytes[i], current_device()) == cuda::kAccessReadWrite);
    s.pending.push_back({++s.sequence, stream, to[i], nbytes[i], as_pointer(from[i])});
  }
  return 0;
}
// The device of the stream needs access to both ends.
Result copy_on_device(cuda::DevicePointer to, cuda::DevicePointer from, std::size_t nbytes, cuda::Stream stream) {
  MAY_FAIL("cuMemcpyDtoDAsync");
  check_stream(s, stream);
  CHECK(access_to(s, to, nbytes, current_device()) == cuda::kAccessReadWrite);
  CHECK(access_to(s, from, nbytes, current_device()) != 0);
  s.pending.push_back({++s.sequence, stream, to, nbytes, as_pointer(from)});
  return 0;
}
// Each device needs access to its own end.
Result copy_between(cuda::DevicePointer to, cuda::Context to_context, cuda::DevicePointer from,
                    cuda::Context from_context, std::size_t nbytes, cuda::Stream stream) {
  MAY_FAIL("cuMemcpyPeerAsync");
  check_stream(s, stream);
  CHECK(access_to(s, to, nbytes, device_of(to_context)) == cuda::kAccessReadWrite);
  CHECK(access_to(s, from, nbytes, device_of(from_context)) != 0);
  s.pending.push_back({++s.sequence, stream, to, nbytes, as_pointer(from)});
  return 0;
}
Result stream_create(cuda::Stream* stream, unsigned flags, int) {
  CHECK(flags == cuda::kStreamNonBlocking);
  MAY_FAIL("cuStreamCreateWithPriority");
  *stream = reinterpret_cast<cuda::Stream>(s.next_id++);
  s.streams[*stream] = current_device();
  return 0;
}
Result stream_destroy(cuda::Stream stream) {
  LOCKED;
  CHECK(s.streams.erase(stream) == 1);
  return 0;
}
Result stream_synchronize(cuda::Stream stream) {
  MAY_FAIL("cuStreamSynchronize");
  check_stream(s, stream);
  carry_out(s, [&](const Work& work) { return work.stream == stream; });
  return 0;
}
Result event_create(cuda::Event* event, unsigned) {
  MAY_FAIL("cuEventCreate");
  *event = reinterpret_cast<cuda::Event>(s.next_id++);
  s.events[*event] = {};
  return 0;
}
Result event_destroy(cuda::Event event) {
  LOCKED;
  CHECK(s.events.erase(event) == 1);
  return 0;
}
Result event_record(cuda::Event event, cuda::Stream stream) {
  MAY_FAIL("cuEventRecord");
  CHECK(s.events.contains(event));
  check_stream(s, stream);
  s.events[event] = {s.sequence, stream, false};
  return 0;
}
Result event_synchronize(cuda::Event event) {
  MAY_FAIL("cuEventSynchronize");
  CHECK(s.events.contains(event));
  const EventState recorded = s.events[event];
  carry_out(s, [&](const Work& work) {
    return work.sequence <= recorded.sequence && (recorded.is_of_context || work.stream == recorded.stream);
  });
  return 0;
}
// Each look carries out one piece of what is waited for.
Result event_query(cuda::Event event) {
  MAY_FAIL("cuEventQuery");
  CHECK(s.events.contains(event));
  const EventState recorded = s.events[event];
  CHECK(!recorded.is_of_context);
  if (s.is_stalled) return cuda::kNotReady;
  const auto next = std::ranges::find_if(s.pending, [&](const Work& work) {
    return work.sequence <= recorded.sequence && work.stream == recorded.stream;
  });
  if (next == s.pending.end()) return 0;
  const std::uint64_t sequence = next->sequence;
  carry_out(s, [&](const Work& work) { return work.sequence == sequence; });
  return cuda::kNotReady;
}
Result unsupported() { return kNotSupported; }

template <typename Function>
void* erased(Function* function) {
  return reinterpret_cast<void*>(function);
}

void* find(const std::string& name) {
  static const std::map<std::string, void*> entries{
      {"cuInit", erased(&init)},
      {"cuDriverGetVersion", erased(&driver_version)},
      {"cuGetErrorName", erased(&error_name)},
      {"cuGetErrorString", erased(&error_string)},
      {"cuDeviceGetCount", erased(&device_count)},
      {"cuDeviceGet", erased(&device_get)},
      {"cuDeviceGetUuid", erased(&device_uuid)},
      {"cuDeviceGetAttribute", erased(&device_attribute)},
      {"cuDeviceCanAccessPeer", erased(&device_can_access_peer)},
      {"cuDevicePrimaryCtxRetain", erased(&context_retain)},
      {"cuCtxPushCurrent", erased(&context_push)},
      {"cuCtxPopCurrent", erased(&context_pop)},
      {"cuCtxSynchronize", erased(&context_synchronize)},
      {"cuCtxGetStreamPriorityRange", erased(&priority_range)},
      {"cuCtxRecordEvent", erased(&context_record_event)},
      {"cuMemGetInfo", erased(&mem_info)},
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
      {"cuMemHostAlloc", erased(&host_alloc)},
      {"cuMemFreeHost", erased(&host_free)},
      {"cuMemcpyHtoDAsync", erased(&copy_to_device)},
      {"cuMemcpyBatchAsync", erased(&copy_batch)},
      {"cuMemcpyDtoDAsync", erased(&copy_on_device)},
      {"cuMemcpyPeerAsync", erased(&copy_between)},
      {"cuStreamCreateWithPriority", erased(&stream_create)},
      {"cuStreamDestroy", erased(&stream_destroy)},
      {"cuStreamSynchronize", erased(&stream_synchronize)},
      {"cuEventCreate", erased(&event_create)},
      {"cuEventDestroy", erased(&event_destroy)},
      {"cuEventRecord", erased(&event_record)},
      {"cuEventQuery", erased(&event_query)},
      {"cuEventSynchronize", erased(&event_synchronize)},
  };
  const auto found = entries.find(name);
  return found == entries.end() ? erased(&unsupported) : found->second;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Result cuGetProcAddress_v2(const char* name, void** function, int,
                                                                            unsigned long long, int*) {
  *function = find(name);
  return cuda::kSuccess;
}

extern "C" __attribute__((visibility("default"))) const FakeCuda& fake_cuda() {
  static const FakeCuda control{
      .fail_call =
          [](int nth, int result) {
            LOCKED;
            s.call_in = nth;
            s.call_result = result;
            s.calls = 0;
          },
      .fail_entry =
          [](const char* entry, int nth, int result) {
            LOCKED;
            s.entries[entry] = {nth, result};
          },
      .calls =
          [] {
            LOCKED;
            return s.calls;
          },
      .submit_read =
          [](std::uint64_t address, std::uint64_t nbytes) {
            LOCKED;
            s.pending.push_back({++s.sequence, nullptr, address, nbytes, nullptr});
          },
      .pending =
          [] {
            LOCKED;
            return s.pending.size();
          },
      .access =
          [](std::uint64_t address) {
            LOCKED;
            CHECK(s.mappings.contains(address));
            return std::ranges::max(s.mappings[address].access);
          },
      .live =
          [] {
            LOCKED;
            return s.handles.size() + s.reservations.size() + s.mappings.size() + s.events.size() +
                   s.streams.size() + s.pinned.size();
          },
      .set_free_bytes =
          [](std::uint64_t nbytes) {
            LOCKED;
            s.free_bytes.fill(nbytes);
          },
      .set_peer_access =
          [](bool is_possible) {
            LOCKED;
            s.has_peer_access = is_possible;
          },
      .set_batches =
          [](bool is_possible) {
            LOCKED;
            s.has_batches = is_possible;
          },
      .stall =
          [](bool is_stalled) {
            LOCKED;
            s.is_stalled = is_stalled;
          },
      .take_batches =
          [] {
            LOCKED;
            return std::exchange(s.batches, {});
          },
      .set_capturing =
          [](bool is_capturing) {
            LOCKED;
            s.is_capturing = is_capturing;
          },
  };
  return control;
}
