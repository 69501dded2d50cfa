#include "cuda_digests.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "crc32.hpp"
#include "crc32_polynomial.hpp"
#include "cuda_driver.hpp"
#include "cuda_event.hpp"
#include "cuda_kernels.hpp"  // generated from kernels/
#include "cuda_stream.hpp"
#include "error.hpp"
#include "nvrtc.hpp"
#include "pinned_buffer.hpp"
#include "sha256.hpp"

namespace changeover {
namespace {

// As in kernels/crc32.cu.
constexpr unsigned kCrcThreads = 256;
constexpr unsigned kCrcLevels = 8;
constexpr unsigned kCrcChunkLog2 = 11;
constexpr std::uint64_t kCrcBlockBytes = std::uint64_t{kCrcThreads} << kCrcChunkLog2;
static_assert(1U << kCrcLevels == kCrcThreads);

// Small blocks spread the leaves of one tensor over the whole device.
constexpr unsigned kShaThreads = 32;

// As in kernels/sha256.cu.
struct LeafRange {
  cuda::DevicePointer data;
  std::uint64_t nbytes;
  std::uint64_t first_leaf;
};

// Of each leaf in one launch where a call is spread: 16 KiB, a few tenths of a millisecond of one thread.
constexpr std::uint64_t kSliceBlocks = 256;

constexpr std::uint64_t kResultBytes = std::uint64_t{4} << 20;
constexpr std::size_t kRangesPerLaunch = 8192;
constexpr std::uint64_t kLeavesPerLaunch = kResultBytes / kSha256Bytes;
constexpr std::uint64_t kCrcBlocksPerLaunch = kResultBytes / sizeof(std::uint32_t);

struct Shifts {
  std::uint32_t by_level[kCrcLevels];
};

// x^(8 * chunk * 2^level): moves a CRC over the neighbour's bytes.
constexpr Shifts make_shifts() {
  const auto powers = crc32_polynomial::make_byte_powers();
  Shifts shifts{};
  for (unsigned level = 0; level < kCrcLevels; ++level) shifts.by_level[level] = powers[kCrcChunkLog2 + level];
  return shifts;
}

cuda::Function load(CudaDevice& device, const std::vector<std::string>& libraries, const char* source,
                    const char* name) {
  const std::string image = compile_kernels(libraries, source, name, device.compute_capability());
  const ContextScope scope(device);
  cuda::Module module = nullptr;
  CudaDriver::get().module_load(&module, image.data());
  cuda::Function function = nullptr;
  CudaDriver::get().module_get_function(&function, module, name);
  return function;  // its module lives as long as the device's context, which is for good
}

}  // namespace

struct CudaDigests::Lane {
  explicit Lane(int priority)
      : stream(priority), results(kResultBytes), ranges(kRangesPerLaunch * sizeof(LeafRange)) {}
  CudaStream stream;
  CudaEvent done;
  PinnedBuffer results;  // kernels write here through the bus: far less than they read
  PinnedBuffer ranges;

  void begin(cuda::Function function, std::uint64_t blocks, unsigned threads, void** arguments) {
    const CudaDriver& driver = CudaDriver::get();
    driver.launch(function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, 0, stream.borrow(), arguments,
                  nullptr);
    done.record(stream.borrow());
  }
  void wait() const { done.synchronize(); }
};

CudaDigests::CudaDigests(CudaDevice& device, const std::vector<std::string>& nvrtc_libraries)
    : device_(device),
      crc32_(load(device, nvrtc_libraries, kernels::kCrc32, "crc32_blocks")),
      sha256_(load(device, nvrtc_libraries, kernels::kSha256, "sha256_leaves")),
      lanes_(std::make_unique<LanePool<Lane>>()) {}

CudaDigests::~CudaDigests() = default;

std::unique_ptr<CudaDigests::Lane> CudaDigests::make_lane() const {
  return std::make_unique<Lane>(device_.least_priority());
}

std::uint32_t CudaDigests::crc32(cuda::DevicePointer data, std::uint64_t nbytes) {
  if (nbytes == 0) return 0;
  const ContextScope scope(device_);
  const Lease lease(*lanes_, [this] { return make_lane(); });
  Lane& lane = *lease;
  static constexpr Shifts kShifts = make_shifts();
  // Linear remainders, from state 0 and not inverted: leading zeros do not count, so the first block
  // may be imagined to start before the data.
  std::uint32_t remainder = 0;
  for (std::uint64_t left = nbytes; left > 0;) {
    std::uint64_t part = std::min(left, kCrcBlocksPerLaunch * kCrcBlockBytes);
    std::uint64_t blocks = (part + kCrcBlockBytes - 1) / kCrcBlockBytes;
    std::uint64_t padding = blocks * kCrcBlockBytes - part;
    Shifts shifts = kShifts;
    auto* results = reinterpret_cast<std::uint32_t*>(lane.results.bytes().data());
    void* arguments[] = {&data, &padding, &shifts, &results};
    lane.begin(crc32_, blocks, kCrcThreads, arguments);
    lane.wait();
    std::uint32_t part_remainder = 0;
    for (std::uint64_t block = 0; block < blocks; ++block) {
      part_remainder = crc32_combine(part_remainder, results[block], kCrcBlockBytes);
    }
    remainder = crc32_combine(remainder, part_remainder, part);
    data += part;
    left -= part;
  }
  // The CRC starts from all ones and ends inverted.
  return ~crc32_combine(0xFFFFFFFF, remainder, nbytes);
}

void CudaDigests::digest(std::span<const DeviceRange> ranges, std::uint64_t leaf_bytes,
                         std::span<std::byte> leaves_out, std::span<std::uint32_t> crcs,
                         std::chrono::nanoseconds spread) {
  if (leaf_bytes == 0) throw Misuse("a leaf has at least one byte");
  const ContextScope scope(device_);
  const Lease lease(*lanes_, [this] { return make_lane(); });
  Lane& lane = *lease;
  auto* const table = reinterpret_cast<LeafRange*>(lane.ranges.bytes().data());
  const auto started = std::chrono::steady_clock::now();
  double total_bytes = 0;
  double launched_bytes = 0;
  for (const DeviceRange& each : ranges) total_bytes += static_cast<double>(each.nbytes);
  std::size_t range = 0;
  std::size_t checked = 0;
  std::uint64_t done_bytes = 0;  // of the range: it may be cut at a leaf where a launch is full
  while (range < ranges.size()) {
    std::uint32_t count = 0;
    std::uint64_t leaves = 0;
    std::uint64_t longest = 0;  // leaf
    double bytes = 0;
    while (range < ranges.size() && count < kRangesPerLaunch && leaves < kLeavesPerLaunch) {
      const std::uint64_t left = ranges[range].nbytes - done_bytes;
      const std::uint64_t take = std::min(leaf_count(left, leaf_bytes), kLeavesPerLaunch - leaves);
      // Written so that no product can wrap.
      const std::uint64_t taken_bytes = take == leaf_count(left, leaf_bytes) ? left : take * leaf_bytes;
      if (take > 0) table[count++] = {ranges[range].data + done_bytes, taken_bytes, leaves};
      leaves += take;
      longest = std::max(longest, std::min(leaf_bytes, taken_bytes));
      bytes += static_cast<double>(taken_bytes);
      done_bytes += taken_bytes;
      if (done_bytes == ranges[range].nbytes) {
        ++range;
        done_bytes = 0;
      }
    }
    if (leaves == 0) continue;  // empty ranges alone
    std::byte* results = lane.results.bytes().data();
    const LeafRange* first = table;
    const std::size_t launched = std::min(crcs.size(), range);  // ranges whose checksums are due
    const std::size_t before = checked;
    const std::uint64_t blocks = longest / 64 + 2;  // at most, with the padding
    const std::uint64_t slice = spread.count() > 0 ? kSliceBlocks : blocks;
    for (std::uint64_t begin = 0; begin < blocks; begin += slice) {
      std::uint64_t end = begin + slice;
      std::uint32_t one = 1;
      void* arguments[] = {&first, &count, &leaf_bytes, &leaves, &begin, &end, &results, &one};
      lane.begin(sha256_, (leaves + kShaThreads - 1) / kShaThreads, kShaThreads, arguments);
      const double part = std::min(1.0, static_cast<double>(end) / static_cast<double>(blocks));
      // A leaf takes its thread some milliseconds however few there are; checksums fit in beside them.
      const std::size_t due =
          launched > before ? before + static_cast<std::size_t>(part * static_cast<double>(launched - before)) : 0;
      for (; checked < due; ++checked) crcs[checked] = crc32(ranges[checked].data, ranges[checked].nbytes);
      lane.wait();
      if (spread.count() == 0) continue;
      const double share = (launched_bytes + bytes * part) / total_bytes;
      std::this_thread::sleep_until(started + std::chrono::duration_cast<std::chrono::nanoseconds>(spread * share));
    }
    launched_bytes += bytes;
    const std::uint64_t size = leaves * kSha256Bytes;
    std::memcpy(leaves_out.data(), results, size);
    leaves_out = leaves_out.subspan(size);
  }
  for (; checked < crcs.size(); ++checked) crcs[checked] = crc32(ranges[checked].data, ranges[checked].nbytes);
}

}  // namespace changeover
