#include "cuda_device.hpp"

#include <utility>

#include "cuda_digests.hpp"
#include "cuda_driver.hpp"
#include "cuda_release.hpp"
#include "error.hpp"

namespace changeover {
namespace {

std::mutex nvrtc_mutex;
std::vector<std::string> nvrtc_libraries{"libnvrtc.so.13", "libnvrtc.so.12"};

// As nvidia-smi and NVML write it.
std::string uuid_text(const cuda::Uuid& uuid) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kHex[uuid.bytes[i] >> 4];
    text += kHex[uuid.bytes[i] & 15];
  }
  return text;
}

int attribute(int which, cuda::Device device) {
  int value = 0;
  CudaDriver::get().device_get_attribute(&value, which, device);
  return value;
}

}  // namespace

const std::vector<std::unique_ptr<CudaDevice>>& CudaDevice::all() {
  static const auto* const devices = [] {
    int count = 0;
    CudaDriver::get().device_get_count(&count);
    auto found = std::make_unique<std::vector<std::unique_ptr<CudaDevice>>>();
    for (int ordinal = 0; ordinal < count; ++ordinal) found->push_back(std::make_unique<CudaDevice>(ordinal));
    return found.release();
  }();
  return *devices;
}

CudaDevice& CudaDevice::find(const std::string& uuid) {
  for (const auto& device : all()) {
    if (device->uuid() == uuid) return *device;
  }
  throw Misuse("this process sees no device '" + uuid + "'");
}

CudaDevice::CudaDevice(int ordinal) : ordinal_(ordinal) {
  const CudaDriver& driver = CudaDriver::get();
  driver.device_get(&device_, ordinal);
  cuda::Uuid uuid{};
  driver.device_get_uuid(&uuid, device_);
  uuid_ = uuid_text(uuid);
  compute_capability_ =
      attribute(cuda::kAttributeComputeMajor, device_) * 10 + attribute(cuda::kAttributeComputeMinor, device_);
  has_posix_fds_ =
      attribute(cuda::kAttributeVirtualMemory, device_) != 0 && attribute(cuda::kAttributePosixFd, device_) != 0;
}

CudaDevice::~CudaDevice() = default;

cuda::Context CudaDevice::context() {
  const std::lock_guard lock(mutex_);
  if (context_ == nullptr) CudaDriver::get().primary_context_retain(&context_, device_);
  return context_;
}

bool CudaDevice::can_reach(const CudaDevice& other) const {
  int can = 0;
  CudaDriver::get().device_can_access_peer(&can, device_, other.device_);
  return can != 0;
}

cuda::AllocationProperties CudaDevice::allocation_properties() const noexcept {
  cuda::AllocationProperties properties{};
  properties.type = cuda::kAllocationPinned;
  properties.requested_handle_types = cuda::kHandlePosixFd;
  properties.location = {cuda::kLocationDevice, ordinal_};
  return properties;
}

int CudaDevice::numa_node() const noexcept {
  int node = -1;
  const auto& ask = CudaDriver::get().device_get_attribute;
  return ask.attempt(&node, cuda::kAttributeHostNumaNode, device_) == cuda::kSuccess ? node : -1;
}

std::uint64_t CudaDevice::granularity_bytes() {
  const ContextScope scope(*this);
  const std::lock_guard lock(mutex_);
  if (granularity_bytes_ == 0) {
    std::size_t granularity = std::size_t{2} << 20;  // what legacy blocks are rounded to
    if (has_posix_fds_) {
      const cuda::AllocationProperties properties = allocation_properties();
      CudaDriver::get().mem_get_granularity(&granularity, &properties, cuda::kGranularityRecommended);
    }
    granularity_bytes_ = granularity;
  }
  return granularity_bytes_;
}

DeviceMemory CudaDevice::memory() {
  const ContextScope scope(*this);
  std::size_t free = 0;
  std::size_t total = 0;
  CudaDriver::get().mem_get_info(&free, &total);
  return {free, total};
}

int CudaDevice::least_priority() {
  const ContextScope scope(*this);
  int least = 0;
  int greatest = 0;
  CudaDriver::get().stream_priority_range(&least, &greatest);
  return least;
}

ReleaseQueue& CudaDevice::releases() {
  const std::lock_guard lock(mutex_);
  if (!releases_) releases_ = std::make_unique<ReleaseQueue>(*this);
  return *releases_;
}

CudaDigests& CudaDevice::digests() {
  static_cast<void>(context());
  const std::lock_guard lock(nvrtc_mutex);
  if (!digests_) digests_ = std::make_unique<CudaDigests>(*this, nvrtc_libraries);
  return *digests_;
}

void CudaDevice::set_nvrtc_libraries(std::vector<std::string> paths) {
  const std::lock_guard lock(nvrtc_mutex);
  nvrtc_libraries = std::move(paths);
}

ContextScope::ContextScope(CudaDevice& device) { CudaDriver::get().context_push(device.context()); }

ContextScope::~ContextScope() {
  cuda::Context popped = nullptr;
  // Fails only when the process is ending and the driver is gone.
  static_cast<void>(CudaDriver::get().context_pop.attempt(&popped));
}

}  // namespace changeover
