// Device memory on a driver that fails at every call, and waits for nothing on its own (fake_cuda.hpp).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "crc32.hpp"
#include "cuda_release.hpp"
#include "cuda_reserve.hpp"
#include "cuda_slab.hpp"
#include "error.hpp"
#include "fake_cuda.hpp"
#include "remapped_region.hpp"

using namespace changeover;
using namespace changeover::stress;

namespace {

constexpr std::uint64_t kStepBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kSlotBytes = 64 << 10;
constexpr std::uint64_t kDeviceBytes = std::uint64_t{1} << 30;  // of the fake driver
constexpr int kPlanted = 719;

class File {
 public:
  explicit File(std::uint64_t nbytes, std::uint32_t seed = 1)
      : bytes(nbytes), fd(::memfd_create("file", MFD_CLOEXEC)) {
    std::uint32_t word = seed;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>((word = word * 1664525 + 1013904223) >> 24);
    CHECK(::write(fd.borrow(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }

  std::vector<std::byte> bytes;
  UniqueFd fd;
};

CudaDevice& device() { return *CudaDevice::all().front(); }
CudaDevice& other_device() { return *CudaDevice::all().back(); }

std::size_t open_fds() {
  const std::filesystem::directory_iterator fds("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(fds), end(fds)));
}

// Fake device memory lies at real addresses.
std::span<const std::byte> resident(const CudaRegion& region) {
  return {reinterpret_cast<const std::byte*>(region.address()), region.nbytes()};
}

std::unique_ptr<CudaSlab> sealed(Budget& budget, const std::shared_ptr<CudaStaging>& staging, const File& file,
                                 const char* id = "slab") {
  const auto slab = WritableCudaSlab::create(budget, staging, id, file.bytes.size(), false);
  const std::uint32_t crc = slab->read_file(file.fd.borrow(), 0, 0, file.bytes.size());
  CHECK(crc == crc32(file.bytes));
  return slab->seal();
}

void a_slot_is_filled_again_only_after_its_copy() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(2 * kStepBytes);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    const auto slab = sealed(*budget, staging, file);
    CHECK(fake_cuda().pending() == 0);
    CHECK(crc32(resident(*slab->share())) == crc32(file.bytes));
    CHECK((::fcntl(slab->borrow_fd(), F_GETFD) & FD_CLOEXEC) != 0);
    // Not even its writer can write to it any more.
    CHECK(fake_cuda().access(slab->share()->address()) == cuda::kAccessRead);
    const auto copy =
        CudaSlab::import(*budget, device(), "slab", slab->nbytes(), UniqueFd(::dup(slab->borrow_fd())));
    CHECK(fake_cuda().access(copy->share()->address()) == cuda::kAccessRead);
    slab->close();
    CHECK(crc32(resident(*copy->share())) == crc32(file.bytes));
    copy->close();
    CHECK(budget->used_bytes() == 0);
  }
  CHECK(fake_cuda().live() == 0);
}

void threads_have_lanes_of_their_own() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(4 * kStepBytes);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    const auto writable = WritableCudaSlab::create(*budget, staging, "slab", file.bytes.size(), false);
    {
      std::vector<std::jthread> readers;
      for (std::uint64_t part = 0; part < 8; ++part) {
        readers.emplace_back([&, part] {
          const std::uint64_t size = file.bytes.size() / 8;
          CHECK(writable->read_file(file.fd.borrow(), part * size, part * size, size) ==
                crc32(std::span(file.bytes).subspan(part * size, size)));
        });
      }
    }
    const auto slab = writable->seal();
    CHECK(crc32(resident(*slab->share())) == crc32(file.bytes));
    slab->close();
  }
  CHECK(fake_cuda().live() == 0);
}

void copies_of_a_driver_without_batches_are_the_same() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(2 * kStepBytes);
  fake_cuda().set_batches(false);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 4);
    const auto slab = sealed(*budget, staging, file);
    CHECK(crc32(resident(*slab->share())) == crc32(file.bytes));
    slab->close();
  }
  fake_cuda().set_batches(true);
  CHECK(fake_cuda().live() == 0);
}

// Or all slots of all readers would come free at once, or the engine would wait.
void a_few_batches_of_a_few_copies_are_under_way() {
  constexpr std::size_t kMostBatches = 3;
  constexpr std::size_t kMostCopies = 14;
  constexpr unsigned kSlots = 64;
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(kSlots * kSlotBytes);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, kSlots);
    const auto writable = WritableCudaSlab::create(*budget, staging, "slab", file.bytes.size(), false);
    static_cast<void>(fake_cuda().take_batches());
    fake_cuda().stall(true);
    writable->read_file(file.fd.borrow(), 0, 0, file.bytes.size());
    std::size_t under_way = 0;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (under_way < kMostBatches && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
      under_way += fake_cuda().take_batches().size();
    }
    CHECK(under_way == kMostBatches);
    fake_cuda().stall(false);
    const auto slab = writable->seal();
    CHECK(crc32(resident(*slab->share())) == crc32(file.bytes));
    CHECK(std::ranges::max(fake_cuda().take_batches()) == kMostCopies);
    slab->close();
  }
  CHECK(fake_cuda().live() == 0);
}

// Told by the slab that lacks the bytes, and by no other.
void a_copy_that_failed_is_told_before_the_slab_is_sealed() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(2 * kStepBytes);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 4);
  for (const char* entry : {"cuMemcpyBatchAsync", "cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"}) {
    fake_cuda().set_batches(std::string(entry) != "cuMemcpyHtoDAsync");
    fake_cuda().fail_entry(entry, 1, kPlanted);
    CHECK_THROWS(sealed(*budget, staging, file), SystemError);
    device().releases().settle();
    const auto next = sealed(*budget, staging, file);
    CHECK(crc32(resident(*next->share())) == crc32(file.bytes));
    next->close();
  }
  fake_cuda().set_batches(true);
  device().releases().settle();
  CHECK(budget->used_bytes() == 0);
}

// Its slot is filled again, and its slab goes.
void a_copy_that_failed_does_not_run_on() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(kStepBytes);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
  for (const char* entry : {"cuEventRecord", "cuEventQuery"}) {
    {
      const auto writable = WritableCudaSlab::create(*budget, staging, "slab", kStepBytes, false);
      fake_cuda().fail_entry(entry, 1, kPlanted);
      writable->read_file(file.fd.borrow(), 0, 0, kSlotBytes);
      CHECK_THROWS(writable->seal(), SystemError);
      CHECK(fake_cuda().pending() == 0);
    }
    device().releases().settle();
    CHECK(budget->used_bytes() == 0);
  }
}

void memory_waits_for_work_it_does_not_know() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(kStepBytes);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
  // The fake driver ends the program if this is unmapped while the work is pending.
  auto slab = sealed(*budget, staging, file);
  fake_cuda().submit_read(slab->share()->address(), kStepBytes);
  slab->close();
  CHECK(fake_cuda().pending() == 0 && budget->used_bytes() == 0);

  slab = sealed(*budget, staging, file);
  std::shared_ptr<const CudaRegion> tensor = slab->share();
  slab->close();
  CHECK(budget->used_bytes() == kStepBytes && crc32(resident(*tensor)) == crc32(file.bytes));
  fake_cuda().submit_read(tensor->address(), kStepBytes);
  tensor.reset();
  device().releases().settle();
  CHECK(fake_cuda().pending() == 0 && budget->used_bytes() == 0);

  // A writer that gives up has copies under way.
  const auto writable = WritableCudaSlab::create(*budget, staging, "slab", kStepBytes, false);
  writable->read_file(file.fd.borrow(), 0, 0, kStepBytes);
  writable->close();
  CHECK(fake_cuda().pending() == 0 && budget->used_bytes() == 0);
  {
    const auto dropped = WritableCudaSlab::create(*budget, staging, "slab", kStepBytes, false);
    dropped->read_file(file.fd.borrow(), 0, 0, kStepBytes);
  }
  device().releases().settle();
  CHECK(fake_cuda().pending() == 0 && budget->used_bytes() == 0);
}

// The fake driver ends the program where a copy is submitted into memory that is gone.
void a_slab_may_be_closed_while_it_is_filled() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(kStepBytes);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 4);
  for (int round = 0; round < 20; ++round) {
    const auto writable = WritableCudaSlab::create(*budget, staging, "slab", kStepBytes, false);
    std::vector<std::jthread> readers;
    for (std::uint64_t part = 0; part < 3; ++part) {
      readers.emplace_back([&, part] {
        try {
          for (;;) writable->read_file(file.fd.borrow(), 0, part * 4 * kSlotBytes, 4 * kSlotBytes);
        } catch (const Misuse&) {
          return;  // closed
        }
      });
    }
    for (int turn = 0; turn < round; ++turn) std::this_thread::yield();
    writable->close();
    readers.clear();  // one of them may have been the last owner
    device().releases().settle();
    CHECK(budget->used_bytes() == 0);
  }
}

void nothing_is_released_while_a_stream_is_captured() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(kStepBytes);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
  for (int round = 0; round < 100; ++round) {
    const auto before = sealed(*budget, staging, file);
    const auto slab = sealed(*budget, staging, file, "other");
    std::shared_ptr<const CudaRegion> first = before->share();
    std::shared_ptr<const CudaRegion> tensor = slab->share();
    before->close();
    slab->close();
    first.reset();
    // The hold begins before, while and after it is released.
    for (int turn = 0; turn < round; ++turn) std::this_thread::yield();
    ReleaseHold hold(device());
    ReleaseHold another(device());
    fake_cuda().set_capturing(true);
    tensor.reset();  // as a collector of garbage might
    another.close();
    another.close();
    for (int turn = 0; turn < 2; ++turn) CHECK(crc32(file.bytes) != 0);  // long enough to be caught
    CHECK(budget->used_bytes() >= kStepBytes);
    fake_cuda().set_capturing(false);
    hold.close();
    device().releases().settle();
    CHECK(budget->used_bytes() == 0);
  }
}

void foreign_memory_is_refused() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(2 * kStepBytes);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
  const auto slab = sealed(*budget, staging, file);
  const std::size_t fds = open_fds();
  const std::size_t live = fake_cuda().live();
  const auto import = [&](int fd, std::uint64_t nbytes) {
    return CudaSlab::import(*budget, device(), "slab", nbytes, UniqueFd(::dup(fd)));
  };
  CHECK_THROWS(import(file.fd.borrow(), 2 * kStepBytes), ForeignHandle);
  for (const std::uint64_t nbytes : {std::uint64_t{0}, kStepBytes, 3 * kStepBytes, 2 * kStepBytes - 1}) {
    CHECK_THROWS(import(slab->borrow_fd(), nbytes), ForeignHandle);
  }
  CHECK(open_fds() == fds && fake_cuda().live() == live && budget->used_bytes() == 2 * kStepBytes);
  slab->close();
}

void what_does_not_fit_says_so() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
  CHECK_THROWS(WritableCudaSlab::create(*budget, staging, "slab", 1, false), Misuse);
  try {
    WritableCudaSlab::create(*budget, staging, "slab", std::uint64_t{4} << 30, false);
    CHECK(!"more than there is");
  } catch (const DeviceMemoryExceeded& error) {
    CHECK(error.needed_bytes() == std::uint64_t{4} << 30 && error.free_bytes() == std::uint64_t{1} << 30);
  }
  CHECK(budget->used_bytes() == 0);
}

// Break `work` at its n-th call for every n, and find nothing left behind each time.
int break_everywhere(const std::function<void()>& work) {
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

void every_failure_unwinds() {
  const File file(kStepBytes);
  const int calls = break_everywhere([&] {
    const auto budget = std::make_shared<Budget>(std::nullopt);
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    const auto slab = sealed(*budget, staging, file);
    const auto copy =
        CudaSlab::import(*budget, device(), "slab", kStepBytes, UniqueFd(::dup(slab->borrow_fd())));
    RemappedRegion region(device(), kStepBytes);
    region.exchange({copy->share()});
  });
  CHECK(calls > 100);
}

void a_reserve_holds_what_there_is() {
  CHECK_THROWS(CudaReserve(device(), kStepBytes + 1), Misuse);
  CHECK_THROWS(CudaReserve(device(), 0), Misuse);
  fake_cuda().set_free_bytes(3 * kStepBytes + 1);
  {
    CudaReserve reserve(device(), kStepBytes);
    CHECK(reserve.resize(5) == 3 && reserve.pieces() == 3 && fake_cuda().live() == 3);
    CHECK(device().memory().free_bytes == 1);
    CHECK(reserve.resize(1) == 1 && fake_cuda().live() == 1);
    CHECK(device().memory().free_bytes == 2 * kStepBytes + 1);
    CHECK(reserve.resize(2) == 2);
  }
  CHECK(device().memory().free_bytes == 3 * kStepBytes + 1);
  {
    // What a reader maps is not there to be reserved, though its writer has given it up.
    const auto budget = std::make_shared<Budget>(std::nullopt);
    const File file(2 * kStepBytes);
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    const auto slab = sealed(*budget, staging, file);
    const auto copy =
        CudaSlab::import(*budget, device(), "slab", slab->nbytes(), UniqueFd(::dup(slab->borrow_fd())));
    slab->close();
    CudaReserve reserve(device(), kStepBytes);
    CHECK(reserve.resize(3) == 1);
    CHECK(crc32(resident(*copy->share())) == crc32(file.bytes));
    copy->close();
    CHECK(reserve.resize(3) == 3);
  }
  fake_cuda().set_free_bytes(kDeviceBytes);
  const int calls = break_everywhere([] {
    CudaReserve reserve(device(), kStepBytes);
    reserve.resize(3);
    reserve.resize(1);
  });
  CHECK(calls >= 3);
}

std::unique_ptr<CudaSlab> replica_of(Budget& budget, CudaDevice& to, const CudaSlab& slab) {
  const auto staging = std::make_shared<CudaStaging>(to, kSlotBytes, 2);
  const auto writable = WritableCudaSlab::create(budget, staging, "replica", slab.nbytes(), false);
  writable->copy_from(slab);
  CHECK(fake_cuda().pending() == 0);  // or it would be sealed before it is whole
  return writable->seal();
}

void replicas_are_whole_and_sealed_on_their_own_device() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(2 * kStepBytes);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    for (const bool is_reachable : {true, false}) {
      fake_cuda().set_peer_access(is_reachable);
      for (CudaDevice* const to : {&device(), &other_device()}) {
        const auto slab = sealed(*budget, staging, file);
        const auto replica = replica_of(*budget, *to, *slab);
        // Neither end can be written to, and the source's addresses at the reader are gone.
        CHECK(fake_cuda().access(slab->share()->address()) == cuda::kAccessRead);
        CHECK(fake_cuda().access(replica->share()->address()) == cuda::kAccessRead);
        slab->close();
        CHECK(budget->used_bytes() == replica->nbytes() && &replica->share()->device() == to);
        CHECK(crc32(resident(*replica->share())) == crc32(file.bytes));
        // One device's memory is not taken for another's.
        CudaDevice& foreign = to == &device() ? other_device() : device();
        CHECK_THROWS(CudaSlab::import(*budget, foreign, "replica", replica->nbytes(),
                                      UniqueFd(::dup(replica->borrow_fd()))),
                     ForeignHandle);
        replica->close();
        CHECK(budget->used_bytes() == 0);
      }
    }
    fake_cuda().set_peer_access(true);

    const auto slab = sealed(*budget, staging, file);
    const auto small = WritableCudaSlab::create(*budget, staging, "small", kStepBytes, false);
    CHECK_THROWS(small->copy_from(*slab), Misuse);
    small->close();
    CHECK_THROWS(small->copy_from(*slab), Misuse);
    slab->close();

    // A copy that fails while it runs is not taken for one that is whole.
    const auto again = sealed(*budget, staging, file);
    const auto broken = WritableCudaSlab::create(*budget, staging, "broken", file.bytes.size(), false);
    fake_cuda().fail_entry("cuStreamSynchronize", 1, kPlanted);
    CHECK_THROWS(broken->copy_from(*again), SystemError);
    broken->close();
    again->close();
    const auto closed = WritableCudaSlab::create(*budget, staging, "closed", file.bytes.size(), false);
    CHECK_THROWS(closed->copy_from(*slab), Misuse);
    closed->close();
  }
  CHECK(fake_cuda().live() == 0);
}

void every_failure_of_a_replica_unwinds() {
  const File file(kStepBytes);
  for (const bool is_reachable : {true, false}) {
    fake_cuda().set_peer_access(is_reachable);
    const int calls = break_everywhere([&] {
      const auto budget = std::make_shared<Budget>(std::nullopt);
      const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
      const auto slab = sealed(*budget, staging, file);
      static_cast<void>(replica_of(*budget, other_device(), *slab));
    });
    CHECK(calls > 50);
  }
  fake_cuda().set_peer_access(true);
}

void replicas_are_made_by_several_threads() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(2 * kStepBytes);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    const auto slab = sealed(*budget, staging, file);
    {
      std::vector<std::jthread> copiers;
      for (int index = 0; index < 4; ++index) {
        copiers.emplace_back([&, index] {
          const auto to = std::make_shared<CudaStaging>(index % 2 ? device() : other_device(), kSlotBytes, 2);
          const auto writable = WritableCudaSlab::create(*budget, to, std::to_string(index), slab->nbytes(), false);
          writable->copy_from(*slab);
          const auto replica = writable->seal();
          CHECK(crc32(resident(*replica->share())) == crc32(file.bytes));
          replica->close();
        });
      }
    }
    slab->close();
    CHECK(budget->used_bytes() == 0);
  }
  CHECK(fake_cuda().live() == 0);
}

void a_failed_exchange_puts_the_old_slabs_back() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File old_file(kStepBytes, 1);
  const File new_file(kStepBytes, 2);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    const auto a = sealed(*budget, staging, old_file, "a");
    const auto b = sealed(*budget, staging, new_file, "b");
    RemappedRegion region(device(), 2 * kStepBytes);
    const auto shows = [&](const File& first, const File& second) {
      const auto* const at = reinterpret_cast<const std::byte*>(region.range(0, 2 * kStepBytes));
      return crc32({at, kStepBytes}) == crc32(first.bytes) &&
             crc32({at + kStepBytes, kStepBytes}) == crc32(second.bytes);
    };
    region.exchange({a->share(), a->share()});
    CHECK(shows(old_file, old_file));
    for (const auto& [entry, nth] : {std::pair{"cuCtxSynchronize", 1}, std::pair{"cuMemMap", 1},
                                     std::pair{"cuMemMap", 2}, std::pair{"cuMemSetAccess", 1}}) {
      fake_cuda().fail_entry(entry, nth, kPlanted);
      CHECK_THROWS(region.exchange({b->share(), a->share()}), SystemError);
      CHECK(shows(old_file, old_file));
    }
    fake_cuda().submit_read(region.range(0, 1), kStepBytes);  // a step in flight
    region.exchange({b->share(), a->share()});
    CHECK(shows(new_file, old_file) && fake_cuda().pending() == 0);
    CHECK_THROWS(region.exchange({a->share()}), Misuse);
    CHECK(shows(new_file, old_file));

    // The old slabs do not come back either: the region is empty, and whole after the next exchange.
    fake_cuda().fail_entry("cuMemMap", 1, kPlanted);
    fake_cuda().fail_entry("cuMemSetAccess", 1, kPlanted);
    CHECK_THROWS(region.exchange({a->share(), b->share()}), SystemError);
    region.exchange({a->share(), b->share()});
    CHECK(shows(old_file, new_file));
    a->close();
    b->close();
    CHECK(budget->used_bytes() == 2 * kStepBytes);  // the region keeps what it shows
    region.empty();
    device().releases().settle();
    CHECK(budget->used_bytes() == 0);
  }
  CHECK(fake_cuda().live() == 0);
}

void readers_race_with_close() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(kStepBytes);
  const std::uint32_t expected = crc32(file.bytes);
  {
    const auto staging = std::make_shared<CudaStaging>(device(), kSlotBytes, 2);
    for (int round = 0; round < 20; ++round) {
      const auto slab = sealed(*budget, staging, file);
      std::vector<std::jthread> readers;
      for (int i = 0; i < 3; ++i) {
        readers.emplace_back([&] {
          try {
            for (;;) CHECK(crc32(resident(*slab->share())) == expected);
          } catch (const Misuse&) {
            return;  // closed
          }
        });
      }
      slab->close();
      readers.clear();  // one of them may have been the last owner
      device().releases().settle();
      CHECK(budget->used_bytes() == 0);
    }
  }
  CHECK(fake_cuda().live() == 0);
}

}  // namespace

int main() {
  a_slot_is_filled_again_only_after_its_copy();
  threads_have_lanes_of_their_own();
  copies_of_a_driver_without_batches_are_the_same();
  a_few_batches_of_a_few_copies_are_under_way();
  a_copy_that_failed_is_told_before_the_slab_is_sealed();
  a_copy_that_failed_does_not_run_on();
  memory_waits_for_work_it_does_not_know();
  a_slab_may_be_closed_while_it_is_filled();
  nothing_is_released_while_a_stream_is_captured();
  foreign_memory_is_refused();
  what_does_not_fit_says_so();
  every_failure_unwinds();
  a_reserve_holds_what_there_is();
  replicas_are_whole_and_sealed_on_their_own_device();
  every_failure_of_a_replica_unwinds();
  replicas_are_made_by_several_threads();
  a_failed_exchange_puts_the_old_slabs_back();
  readers_race_with_close();
}
