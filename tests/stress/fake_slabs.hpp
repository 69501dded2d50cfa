// Slabs on the devices of the fake driver (fake_cuda.hpp), and what their tests ask of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "check.hpp"
#include "crc32.hpp"
#include "cuda_release.hpp"
#include "cuda_slab.hpp"
#include "error.hpp"
#include "fake_cuda.hpp"
#include "memory_file.hpp"

namespace changeover::stress {

inline constexpr std::uint64_t kStepBytes = std::uint64_t{2} << 20;
inline constexpr std::uint64_t kSlotBytes = 64 << 10;
inline constexpr int kPlanted = 719;

inline CudaDevice& device() { return *CudaDevice::all().front(); }
inline CudaDevice& other_device() { return *CudaDevice::all().back(); }

// Fake device memory lies at real addresses.
inline std::span<const std::byte> resident(const CudaRegion& region) {
  return {reinterpret_cast<const std::byte*>(region.address()), region.nbytes()};
}

inline std::unique_ptr<CudaSlab> sealed(Budget& budget, const std::shared_ptr<CudaStaging>& staging, const File& file,
                                        const char* id = "slab") {
  const auto slab = WritableCudaSlab::create(budget, staging, id, file.bytes.size(), false);
  const std::uint32_t crc = slab->read_file(file.fd.borrow(), 0, 0, file.bytes.size());
  CHECK(crc == crc32(file.bytes));
  return slab->seal();
}

// Break `work` at its n-th call for every n, and find nothing left behind each time.
inline int break_everywhere(const std::function<void()>& work) {
  for (int nth = 1;; ++nth) {
    const std::size_t fds = open_fds();
    fake_cuda().fail_call(nth, kPlanted);
    bool is_whole = false;
    try {
      work();
      is_whole = true;
    } catch (const SystemError& error) {
      CHECK(error.number() == kPlanted);
    }
    const bool was_reached = fake_cuda().calls() >= nth;
    fake_cuda().fail_call(0, 0);
    for (const auto& each : CudaDevice::all()) each->releases().settle();
    CHECK(fake_cuda().live() == 0);
    CHECK(open_fds() == fds);
    if (is_whole && !was_reached) return nth - 1;
  }
}

}  // namespace changeover::stress
