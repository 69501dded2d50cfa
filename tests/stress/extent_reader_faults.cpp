// Reading files that are cached, cold, shrinking and failing; with what the kernel has, and without what
// containers forbid and older kernels lack.
//
//   extent_reader_faults FOLDER [without-io-uring | without-cachestat | without-probes]
//
// FOLDER lies on a disk: a tmpfs has no cold files.
#include "extent_reader.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "crc32.hpp"
#include "error.hpp"
#include "faulty_kernel.hpp"
#include "page_cache.hpp"
#include "scratch_buffer.hpp"
#include "unique_fd.hpp"

using namespace changeover;
using namespace changeover::stress;

namespace {

constexpr std::uint64_t kChunkBytes = 64 << 10;
constexpr unsigned kSlots = 3;
constexpr std::uint64_t kFileBytes = 20 * kChunkBytes + 777;
constexpr unsigned kCachestat = 451;
constexpr long kTmpfs = 0x01021994;  // statfs(2)

std::string folder;
bool has_ring = true;
bool has_probes = true;

// Bytes that go through slots into `memory`; a slot that is placed is poisoned when it is used again.  With
// `is_slow`, what was placed is read until somebody waits for it.
class TestSlots final : public Slots {
 public:
  TestSlots(std::uint64_t nbytes, bool is_in_place, bool is_slow = false)
      : memory(nbytes), is_in_place_(is_in_place), is_slow_(is_slow) {}
  unsigned count() const noexcept override { return kSlots; }
  std::uint64_t chunk_bytes() const noexcept override { return kChunkBytes; }
  bool is_free(unsigned slot) const noexcept override {
    return std::find(placed_.begin(), placed_.end(), slot) == placed_.end();
  }
  void wait_a_moment() override {
    CHECK(!placed_.empty());  // else one is free
    placed_.pop_front();
  }
  std::span<std::byte> reuse(unsigned slot) override {
    CHECK(is_free(slot));
    highest = std::max(highest, slot);
    const auto bytes = buffer_.bytes().subspan(slot * kSlotBytes, kSlotBytes);
    std::memset(bytes.data(), 0xA5, bytes.size());
    ++reused;
    return bytes;
  }
  std::span<std::byte> in_place(std::uint64_t offset, std::uint64_t nbytes) override {
    if (!is_in_place_) return {};
    return std::span(memory).subspan(offset, nbytes);
  }
  void place(unsigned slot, std::span<const std::byte> bytes, std::uint64_t offset) override {
    const auto* const first = buffer_.bytes().data() + slot * kSlotBytes;
    CHECK(slot < kSlots && bytes.data() >= first && bytes.data() + bytes.size() <= first + kSlotBytes);
    CHECK(offset + bytes.size() <= memory.size());
    std::memcpy(memory.data() + offset, bytes.data(), bytes.size());
    if (is_slow_ && is_free(slot)) placed_.push_back(slot);
  }

  std::vector<std::byte> memory;
  int reused = 0;
  unsigned highest = 0;  // slot that was used

 private:
  static constexpr std::uint64_t kSlotBytes = kChunkBytes + kSlotMarginBytes;
  const bool is_in_place_;
  const bool is_slow_;
  std::deque<unsigned> placed_;
  ScratchBuffer buffer_{kSlots * kSlotBytes};
};

class File {
 public:
  File() : bytes(kFileBytes) {
    std::uint32_t word = 7;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>((word = word * 1664525 + 1013904223) >> 24);
    fd = UniqueFd(::openat(AT_FDCWD, folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
    CHECK(static_cast<bool>(fd));
    CHECK(::write(fd.borrow(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    CHECK(::fsync(fd.borrow()) == 0);
  }
  void make_cold() const {
    drop_cached(fd.borrow(), 0, 0);  // 0 bytes: to the end
    CHECK(!has_probes || !is_cached(fd.borrow(), 0, kFileBytes));
  }
  bool is_all_cold() const {
    for (std::uint64_t at = 0; at < kFileBytes; at += 4096) {
      if (is_cached(fd.borrow(), at, 1)) return false;
    }
    return true;
  }

  std::vector<std::byte> bytes;
  UniqueFd fd;
};

// Three pieces, out of order and apart from each other in the destination.
std::vector<Piece> pieces_of(std::uint64_t nbytes) {
  const std::uint64_t first = nbytes / 3;
  return {{nbytes - first + 512, first}, {0, 0}, {0, 1}, {256, nbytes - first - 1}};
}

void check_read(ReadQueue& queue, const File& file, std::uint64_t offset, std::uint64_t nbytes, bool is_in_place) {
  TestSlots slots(nbytes + 1024, is_in_place);
  ExtentReader reader(queue, slots);
  std::vector<Piece> pieces = pieces_of(nbytes);
  reader.read(file.fd.borrow(), offset, pieces);
  for (const Piece& piece : pieces) {
    const auto expected = std::span(file.bytes).subspan(offset, piece.nbytes);
    CHECK(piece.crc == crc32(expected));
    CHECK(piece.nbytes == 0 || std::memcmp(slots.memory.data() + piece.offset, expected.data(), piece.nbytes) == 0);
    offset += piece.nbytes;
  }
}

// The kernel writes to no slot any more.
void check_idle(const ReadQueue& queue) {
  for (unsigned slot = 0; slot < kSlots; ++slot) CHECK(queue.is_idle(slot));
}

struct Extent {
  std::uint64_t offset;
  std::uint64_t nbytes;
};
constexpr Extent kExtents[] = {{0, kFileBytes},      {1, kFileBytes - 1}, {4095, 3},
                               {4096, kChunkBytes},  {100, kChunkBytes},  {8191, 5 * kChunkBytes + 2},
                               {kFileBytes - 2, 2},  {kFileBytes - 5000, 5000}};

void cached_bytes_are_read_as_they_are() {
  const File file;
  ReadQueue queue(kSlots);
  for (const bool is_in_place : {false, true}) {
    for (const Extent& extent : kExtents) check_read(queue, file, extent.offset, extent.nbytes, is_in_place);
  }
  CHECK(!queue.is_asynchronous());  // nothing was cold
  TestSlots slots(kFileBytes, true);
  ExtentReader reader(queue, slots);
  Piece all{0, kFileBytes};
  reader.read(file.fd.borrow(), 0, {&all, 1});
  CHECK(slots.reused == 0 && all.crc == crc32(file.bytes));
}

void a_slot_that_is_still_in_the_cache_is_taken_first() {
  const File file;
  ReadQueue queue(kSlots);
  for (const bool is_slow : {false, true}) {
    TestSlots slots(kFileBytes, false, is_slow);
    ExtentReader reader(queue, slots);
    std::vector<Piece> pieces = {{0, 1000}, {1000, 0}, {1000, 2000}, {3000, kFileBytes - 3000}};
    reader.read(file.fd.borrow(), 0, pieces);
    CHECK(slots.memory == file.bytes);
    CHECK(slots.reused == static_cast<int>((kFileBytes + kChunkBytes - 1) / kChunkBytes));
    CHECK(slots.highest == (is_slow ? kSlots - 1 : 0));
  }
}

void slots_that_are_still_read_are_waited_for() {
  const File file;
  ReadQueue queue(kSlots);
  file.make_cold();
  TestSlots slots(kFileBytes, false, true);
  ExtentReader reader(queue, slots);
  Piece all{0, kFileBytes};
  reader.read(file.fd.borrow(), 0, {&all, 1});
  CHECK(all.crc == crc32(file.bytes) && slots.memory == file.bytes);
}

void cold_bytes_do_not_get_into_the_cache() {
  const File file;
  ReadQueue queue(kSlots);
  for (const bool is_in_place : {false, true}) {
    for (const Extent& extent : kExtents) {
      file.make_cold();
      check_read(queue, file, extent.offset, extent.nbytes, is_in_place);
      CHECK(file.is_all_cold());
    }
  }
  CHECK(queue.is_asynchronous() == has_ring);
}

void what_is_cached_in_part_is_read_from_both() {
  const File file;
  ReadQueue queue(kSlots);
  file.make_cold();
  std::vector<std::byte> warm(3 * kChunkBytes);
  CHECK(real_pread(file.fd.borrow(), warm.data(), warm.size(), 5 * kChunkBytes) ==
        static_cast<ssize_t>(warm.size()));
  CHECK(is_cached(file.fd.borrow(), 5 * kChunkBytes, 3 * kChunkBytes));
  check_read(queue, file, 17, kFileBytes - 17, true);
  CHECK(is_cached(file.fd.borrow(), 5 * kChunkBytes, 3 * kChunkBytes));  // not ours to drop
  CHECK(!is_cached(file.fd.borrow(), 15 * kChunkBytes, kChunkBytes));
}

void a_filesystem_without_direct_io_is_read_as_usual() {
  const File file;
  file.make_cold();
  fake_open = [](const char*, int) {
    errno = EINVAL;
    return -1;
  };
  ReadQueue queue(kSlots);
  check_read(queue, file, 3, kFileBytes - 3, false);
  fake_open = nullptr;
  CHECK(file.is_all_cold());  // and leaves nothing behind
}

// A read that goes past the cache is one into aligned memory at an aligned offset, of whole blocks.
bool is_direct_read(int fd) { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

void a_disk_that_refuses_direct_reads_is_read_as_usual(int refusal) {
  if (has_ring) return;  // the ring's answers cannot be forged
  const File file;
  file.make_cold();
  int refused = 0;
  fake_pread = [&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    if (!is_direct_read(fd)) return real_pread(fd, to, nbytes, offset);
    ++refused;
    errno = refusal;
    return -1;
  };
  ReadQueue queue(kSlots);
  check_read(queue, file, 3, kFileBytes - 3, false);
  fake_pread = nullptr;
  CHECK(refused > 0 && refused <= static_cast<int>(kSlots));  // not asked again and again
}

void errors_say_where(bool is_cold) {
  if (is_cold && has_ring) return;
  const File file;
  if (is_cold) file.make_cold();
  const std::uint64_t bad = 7 * kChunkBytes;
  fake_pread = [&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    if (static_cast<std::uint64_t>(offset) + nbytes > bad + 10) {
      errno = EIO;
      return -1;
    }
    return real_pread(fd, to, nbytes, offset);
  };
  ReadQueue queue(kSlots);
  TestSlots slots(kFileBytes, true);
  ExtentReader reader(queue, slots);
  Piece all{0, kFileBytes};
  try {
    reader.read(file.fd.borrow(), 0, {&all, 1});
    CHECK(!"an EIO is an error");
  } catch (const ReadError& error) {
    CHECK(error.call() == "pread" && error.number() == EIO);
    CHECK(error.file_offset() <= bad + 10 && error.file_offset() + kChunkBytes > bad);
  }
  fake_pread = nullptr;
  check_idle(queue);
  check_read(queue, file, 0, kFileBytes, true);
}

void a_file_that_shrinks_meanwhile_ends_early(bool is_cold) {
  const File file;
  if (is_cold) file.make_cold();
  const std::uint64_t end = 6 * kChunkBytes + 1234;
  ReadQueue queue(kSlots);
  TestSlots slots(kFileBytes, false);
  ExtentReader reader(queue, slots);
  CHECK(::ftruncate(file.fd.borrow(), static_cast<off_t>(end)) == 0);
  Piece all{0, kFileBytes};
  try {
    reader.read(file.fd.borrow(), 0, {&all, 1});
    CHECK(!"an early end is an error");
  } catch (const ReadError& error) {
    CHECK(error.number() == 0 && error.file_offset() == end);
  }
  check_idle(queue);
}

void impossible_ranges_are_refused() {
  ReadQueue queue(kSlots);
  TestSlots slots(4096, true);
  ExtentReader reader(queue, slots);
  const File file;
  Piece huge[2] = {{0, ~std::uint64_t{0} / 2}, {0, ~std::uint64_t{0} / 2}};
  CHECK_THROWS(reader.read(file.fd.borrow(), 0, huge), Misuse);
  Piece byte{0, 1};
  CHECK_THROWS(reader.read(file.fd.borrow(), ~std::uint64_t{0}, {&byte, 1}), Misuse);
  CHECK_THROWS(queue.finish(0), Misuse);
}

void cold_bytes_are_right_whatever_the_kernel_says_of_them() {
  const File file;
  ReadQueue queue(kSlots);
  for (const Extent& extent : kExtents) {
    drop_cached(file.fd.borrow(), 0, 0);
    check_read(queue, file, extent.offset, extent.nbytes, true);
  }
}

// As a container's filter does.
void forbid(unsigned call, unsigned number) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | number),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof filter / sizeof filter[0], filter};
  CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

bool kernel_has_io_uring() {
  std::byte parameters[120] = {};
  const UniqueFd fd(static_cast<int>(::syscall(__NR_io_uring_setup, 1, parameters)));
  return static_cast<bool>(fd);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count >= 2);
  folder = arguments[1];
  const std::string without = count > 2 ? arguments[2] : "";
  has_probes = without != "without-probes";
  const bool has_cachestat = has_probes && without != "without-cachestat";
  if (without == "without-io-uring") forbid(__NR_io_uring_setup, EPERM);
  if (!has_cachestat) forbid(kCachestat, ENOSYS);
  if (!has_probes) forbid(__NR_preadv2, EOPNOTSUPP);
  has_ring = kernel_has_io_uring();
  CHECK(without != "without-io-uring" || !has_ring);

  cached_bytes_are_read_as_they_are();
  a_slot_that_is_still_in_the_cache_is_taken_first();
  impossible_ranges_are_refused();
  errors_say_where(false);
  a_file_that_shrinks_meanwhile_ends_early(false);
  struct statfs facts {};
  CHECK(::statfs(folder.c_str(), &facts) == 0);
  if (facts.f_type == kTmpfs) {
    std::puts("a tmpfs: nothing here is cold");
    return 0;
  }
  cold_bytes_are_right_whatever_the_kernel_says_of_them();
  a_file_that_shrinks_meanwhile_ends_early(true);
  if (!has_cachestat) {
    // Looking at a page brings it in, so that no more can be said.
    const File file;
    drop_cached(file.fd.borrow(), 0, 0);
    CHECK(is_cached(file.fd.borrow(), 0, kFileBytes) == !has_probes);
    return 0;
  }
  cold_bytes_do_not_get_into_the_cache();
  slots_that_are_still_read_are_waited_for();
  what_is_cached_in_part_is_read_from_both();
  a_filesystem_without_direct_io_is_read_as_usual();
  for (const int refusal : {EINVAL, EFAULT, EOPNOTSUPP}) a_disk_that_refuses_direct_reads_is_read_as_usual(refusal);
  errors_say_where(true);
}
