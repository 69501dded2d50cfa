// Slabs copied to the same and to another device, on a driver that fails at every call (fake_cuda.hpp).
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_slabs.hpp"

using namespace changeover;
using namespace changeover::stress;

namespace {

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

}  // namespace

int main() {
  replicas_are_whole_and_sealed_on_their_own_device();
  every_failure_of_a_replica_unwinds();
  replicas_are_made_by_several_threads();
}
