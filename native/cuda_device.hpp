// `CudaDevice`: one GPU that this process can see, by its full UUID.
//
// The driver applies CUDA_VISIBLE_DEVICES before it counts, and torch counts as the driver does, so
// `ordinal` is torch's index too; it means nothing in another process.  Under MIG a device is an instance
// and the UUID is the instance's, in the same spelling.  The primary context is the one
// that torch uses.  It is retained when the device is first used, and for the process's life: tensors
// and the threads that release memory may outlive any destructor.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_api.hpp"

namespace changeover {

class CudaDigests;
class ReleaseQueue;

struct DeviceMemory {
  std::uint64_t free_bytes;
  std::uint64_t total_bytes;
};

class CudaDevice {
 public:
  // The visible devices in the driver's order.  Throws DriverMissing, or SystemError (CUDA_ERROR_NO_DEVICE).
  static const std::vector<std::unique_ptr<CudaDevice>>& all();
  // Throws Misuse if no visible device has this UUID.
  static CudaDevice& find(const std::string& uuid);

  explicit CudaDevice(int ordinal);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice();

  const std::string& uuid() const noexcept { return uuid_; }
  int ordinal() const noexcept { return ordinal_; }
  // `major * 10 + minor`.
  int compute_capability() const noexcept { return compute_capability_; }
  // Whether memory can be mapped from POSIX fds; without it only legacy IPC is left.
  bool has_posix_fds() const noexcept { return has_posix_fds_; }
  // Whether its copies and kernels can use memory of `other` directly.
  bool can_reach(const CudaDevice& other) const;
  // Of the host, nearest to the device; -1 where neither the host nor the driver (before 12.2) tells.
  int numa_node() const noexcept;
  // What sizes of physical allocations are multiples of.
  std::uint64_t granularity_bytes();

  cuda::Context context();
  DeviceMemory memory();
  int least_priority();
  cuda::AllocationProperties allocation_properties() const noexcept;

  // Where the last owners of memory send it.
  ReleaseQueue& releases();
  // Compiled at the first call, with the NVRTC found in `nvrtc_libraries`.
  CudaDigests& digests();

  // Where to look for NVRTC, best first; for all devices, before the first digest.
  static void set_nvrtc_libraries(std::vector<std::string> paths);

 private:
  const int ordinal_;
  cuda::Device device_ = 0;
  std::string uuid_;
  int compute_capability_ = 0;
  bool has_posix_fds_ = false;
  std::mutex mutex_;
  cuda::Context context_ = nullptr;
  std::uint64_t granularity_bytes_ = 0;
  std::unique_ptr<ReleaseQueue> releases_;
  std::unique_ptr<CudaDigests> digests_;
};

// Makes a device's context current in this thread for a scope.
class ContextScope {
 public:
  explicit ContextScope(CudaDevice& device);
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope();
};

}  // namespace changeover
