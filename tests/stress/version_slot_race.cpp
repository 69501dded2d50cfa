// The version slot under fire.  Built again with CHANGEOVER_RELAX set to one of the memory orders, it
// weakens that order throughout the header: planted errors which ThreadSanitizer has to find.
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <array>
#include <vector>

#if defined(CHANGEOVER_RELAX_ACQUIRE)
#define memory_order_acquire memory_order_relaxed
#elif defined(CHANGEOVER_RELAX_RELEASE)
#define memory_order_release memory_order_relaxed
#elif defined(CHANGEOVER_RELAX_ACQ_REL)
#define memory_order_acq_rel memory_order_relaxed
#endif
#include "version_slot.hpp"
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel

#include "slot_race.hpp"

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::stoi(argv[1]) : 5000;
  changeover::stress::SlotRace<changeover::VersionSlot>().run(rounds, 3, 2);
}
