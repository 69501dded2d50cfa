// A planted violation: a slot that first reads which slot is current and then counts.  Between the two
// the slot may be drained and refilled.  The race must end this program; if it does not, the race
// test proves nothing.
#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <thread>

#include "slot_race.hpp"

namespace {

class BrokenSlot {
 public:
  static constexpr int kSlots = 2;

  std::optional<int> acquire() {
    const int slot = current_.load();
    if (slot < 0) return std::nullopt;
    std::this_thread::yield();  // where the scheduler may stop it anyway
    ++counts_[static_cast<std::size_t>(slot)];
    return slot;
  }
  bool try_acquire(int) { return false; }
  void release(int slot) { --counts_[static_cast<std::size_t>(slot)]; }
  void publish(int slot) { current_.store(slot); }
  void retract() { current_.store(-1); }
  void close(int) {}
  void open(int) {}
  bool is_drained(int slot) const { return references(slot) == 0; }
  std::int64_t references(int slot) const { return counts_[static_cast<std::size_t>(slot)].load(); }

 private:
  std::atomic<int> current_{-1};
  std::array<std::atomic<std::int64_t>, kSlots> counts_{};
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::stoi(argv[1]) : 200000;
  changeover::stress::SlotRace<BrokenSlot>().run(rounds, 3, 0);
}
