// Slabs filled from files on a driver that fails, and waits for nothing on its own (fake_cuda.hpp).
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_slabs.hpp"

using namespace changeover;
using namespace changeover::stress;

namespace {

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

}  // namespace

int main() {
  a_slot_is_filled_again_only_after_its_copy();
  threads_have_lanes_of_their_own();
  copies_of_a_driver_without_batches_are_the_same();
  a_few_batches_of_a_few_copies_are_under_way();
  a_copy_that_failed_is_told_before_the_slab_is_sealed();
  a_copy_that_failed_does_not_run_on();
  a_slab_may_be_closed_while_it_is_filled();
}
