// The life of device memory on a driver that fails at every call, and waits for nothing on its own
// (fake_cuda.hpp).
#include <unistd.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_reserve.hpp"
#include "fake_slabs.hpp"
#include "remapped_region.hpp"

using namespace changeover;
using namespace changeover::stress;

namespace {

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
  memory_waits_for_work_it_does_not_know();
  nothing_is_released_while_a_stream_is_captured();
  foreign_memory_is_refused();
  what_does_not_fit_says_so();
  every_failure_unwinds();
  a_reserve_holds_what_there_is();
  a_failed_exchange_puts_the_old_slabs_back();
  readers_race_with_close();
}
