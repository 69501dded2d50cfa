// `CudaStaging`: the way of file bytes to a device, through pinned slots.
//
// Invariants:
//  1. A slot is filled again only after the copy out of it has completed (its event), or a tensor
//     would get bytes of another.
//  2. Each reading thread has a lane to itself: a stream and its slots.  Lanes are made when more
//     threads read at once than ever before, and kept.
//  3. Copies are under way when `read_file` returns; `settle` waits for those of all lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_api.hpp"
#include "cuda_device.hpp"

namespace changeover {

class CudaStaging {
 public:
  // Throws Misuse for less than two slots or an empty one.
  CudaStaging(CudaDevice& device, std::uint64_t slot_bytes, std::size_t slots_per_lane);
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;
  ~CudaStaging();

  CudaDevice& device() const noexcept { return device_; }

  // Copy `nbytes` of a file to `to`; answer their CRC32.  As file_reader.hpp, and SystemError from the
  // driver.  Blocking for the file, not for the last copies.
  std::uint32_t read_file(int borrow_fd, std::uint64_t file_offset, cuda::DevicePointer to,
                          std::uint64_t nbytes);
  // Wait until every copy that was begun has completed.  Throws SystemError if one failed.
  void settle();

 private:
  struct Lane;
  class Lease;

  CudaDevice& device_;
  const std::uint64_t slot_bytes_;
  const std::size_t slots_per_lane_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane*> idle_;
};

}  // namespace changeover
