// `CudaDigests`: checksums and digests of device memory, by kernels.
//
// The kernels are compiled once per device (kernels/).  Each call has a stream of the lowest priority
// and a pinned buffer to itself, so that calls of several threads overlap and serving goes first.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda_api.hpp"
#include "cuda_device.hpp"
#include "lane_pool.hpp"

namespace changeover {

struct DeviceRange {
  cuda::DevicePointer data;
  std::uint64_t nbytes;
};

class CudaDigests {
 public:
  // Compiles.  Throws DriverMissing without NVRTC.
  CudaDigests(CudaDevice& device, const std::vector<std::string>& nvrtc_libraries);
  CudaDigests(const CudaDigests&) = delete;
  CudaDigests& operator=(const CudaDigests&) = delete;
  ~CudaDigests();

  // IEEE CRC32 of `nbytes` at `data`, as crc32.hpp.  Blocking.
  std::uint32_t crc32(cuda::DevicePointer data, std::uint64_t nbytes);
  // The SHA-256 leaves of all ranges, one after the other, as sha256.hpp, and the CRC32 of each unless
  // `crcs` is empty, computed while the leaves are.  Blocking.  Fast only with tens of thousands of leaves
  // at once, whatever their ranges.  With `spread` it takes about that long: in launches of some tenths of a
  // millisecond with pauses, for the sake of whoever else computes on the device.
  void digest(std::span<const DeviceRange> ranges, std::uint64_t leaf_bytes, std::span<std::byte> leaves,
              std::span<std::uint32_t> crcs, std::chrono::nanoseconds spread = {});

 private:
  struct Lane;
  using Lease = LanePool<Lane>::Lease;

  std::unique_ptr<Lane> make_lane() const;

  CudaDevice& device_;
  cuda::Function crc32_ = nullptr;
  cuda::Function sha256_ = nullptr;
  std::unique_ptr<LanePool<Lane>> lanes_;
};

}  // namespace changeover
