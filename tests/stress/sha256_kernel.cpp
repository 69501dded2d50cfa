// The SHA-256 kernel's own source, compiled for the processor and run thread by thread: whole leaves and
// slices of every size, with blocks that arrive as early and as late as they may, against the portable
// digests.  What only a GPU can show is in tests/gpu.
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "check.hpp"
#include "sha256.hpp"

namespace gpu {

struct Index {
  unsigned x;
};
struct uint4 {
  unsigned x, y, z, w;
};
static Index blockIdx, blockDim, threadIdx;

inline unsigned __funnelshift_r(unsigned low, unsigned high, int by) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> by);
}
inline unsigned __byte_perm(unsigned x, unsigned, unsigned) { return __builtin_bswap32(x); }

// What the kernel asks of the hardware: copies of one thread, done at once or only when they are waited for.
struct AsyncCopy {
  uint4* to;
  const uint4* from;
};
static bool is_late;
static std::deque<std::vector<AsyncCopy>> groups_under_way;
static std::vector<AsyncCopy> next_group;

inline void copy_async(uint4* to, const uint4* from) {
  const uint4 read = *from;  // where AddressSanitizer sees a block too many
  *to = is_late ? uint4{0xBAD, 0xBAD, 0xBAD, 0xBAD} : read;
  next_group.push_back({to, from});
}
inline void end_copies() { groups_under_way.push_back(std::exchange(next_group, {})); }
template <int groups>
void wait_for_all_but() {
  for (; groups_under_way.size() > groups; groups_under_way.pop_front()) {
    if (!is_late) continue;
    for (const AsyncCopy& copy : groups_under_way.front()) *copy.to = *copy.from;
  }
}

#define __device__
#define __shared__ static
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __restrict__
#include "kernels/sha256.cu"

}  // namespace gpu

using namespace changeover;

namespace {

void launch(std::span<const gpu::Range> ranges, std::uint64_t leaf_bytes, std::uint64_t leaves, std::uint64_t first,
            std::uint64_t end, std::vector<unsigned>& digests) {
  gpu::blockDim.x = 32;
  for (unsigned thread = 0; thread < (leaves + 31) / 32 * 32; ++thread) {
    gpu::blockIdx.x = thread / 32;
    gpu::threadIdx.x = thread % 32;
    gpu::sha256_leaves(ranges.data(), static_cast<unsigned>(ranges.size()), leaf_bytes, leaves, first, end,
                       digests.data(), 1);
    gpu::groups_under_way.clear();
  }
}

void slices_agree(std::size_t skip, const std::vector<std::size_t>& sizes, std::uint64_t leaf_bytes,
                  std::uint64_t slice) {
  std::vector<std::vector<std::byte>> data;
  std::vector<gpu::Range> ranges;
  std::vector<std::byte> expected;
  std::uint64_t leaves = 0;
  std::size_t longest = 0;
  for (const std::size_t size : sizes) {
    std::vector<std::byte> bytes(skip + size);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 131 + size);
    data.push_back(std::move(bytes));
    const auto part = std::span(data.back()).subspan(skip);
    ranges.push_back({reinterpret_cast<const unsigned char*>(part.data()), size, leaves});
    const std::uint64_t count = leaf_count(size, leaf_bytes);
    std::vector<std::byte> some(count * kSha256Bytes);
    sha256_leaves(part, leaf_bytes, some, ShaIsa::portable);
    expected.insert(expected.end(), some.begin(), some.end());
    leaves += count;
    longest = std::max(longest, std::min<std::size_t>(size, leaf_bytes));
  }
  std::vector<unsigned> digests(leaves * 8, 0xDEADBEEF);
  const std::uint64_t blocks = longest / 64 + 2;  // as cuda_digests.cpp
  for (std::uint64_t first = 0; first < blocks; first += slice) {
    launch(ranges, leaf_bytes, leaves, first, first + slice, digests);
  }
  CHECK(std::memcmp(digests.data(), expected.data(), expected.size()) == 0);
}

}  // namespace

int main() {
  for (const bool is_late : {false, true}) {
    gpu::is_late = is_late;
    for (const std::size_t skip : {0, 1, 16}) {
      for (const std::uint64_t slice : {1, 2, 3, 4, 5, 7, 64, 1000}) {
        slices_agree(skip, {1, 54, 55, 56, 63, 64, 65, 119, 120, 128, 300, 1000}, 256, slice);
        slices_agree(skip, {4096, 17, 5000, 64}, 4096, slice);
        slices_agree(skip, {2000}, 264, slice);  // every other leaf is aligned
        slices_agree(skip, {700}, 1, slice);
      }
    }
  }
}
