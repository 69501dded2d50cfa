// Readers, a writer and racers on one double buffer.
//
// The contents of a slot are plain memory: written before the slot is published, poisoned after it is
// drained.  Whoever holds a reference must find the contents whole.  A slot that counts wrongly shows
// the poison; a slot that orders wrongly is a data race, which ThreadSanitizer reports.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"

namespace changeover::stress {

using Contents = std::array<std::uint64_t, 16>;
inline constexpr std::uint64_t kPoison = ~std::uint64_t{0};

// The version that wrote `contents`; ends the program where they are torn or poisoned.
inline std::uint64_t read_version(const Contents& contents) {
  const std::uint64_t version = contents.front();
  CHECK(version != kPoison);
  for (const std::uint64_t word : contents) CHECK(word == version);
  return version;
}

template <typename Slot>
class SlotRace {
 public:
  // Turn `rounds` times, and on until each of `readers` has acquired the current slot, while `racers` try
  // any slot.
  void run(int rounds, int readers, int racers) {
    for (Contents& each : contents_) each.fill(kPoison);
    CHECK(!slot_.acquire());  // nothing is current, and the count it took is no one's
    std::vector<std::jthread> threads;
    for (int i = 0; i < readers; ++i) threads.emplace_back([this] { read(); });
    for (int i = 0; i < racers; ++i) threads.emplace_back([this, i] { race(i); });
    write(rounds, readers);
    is_over_.store(true, std::memory_order_relaxed);
    threads.clear();
    for (int slot = 0; slot < Slot::kSlots; ++slot) CHECK(slot_.references(slot) == 0);
    std::printf("%d turns, %llu acquisitions, %llu by number\n", rounds,
                static_cast<unsigned long long>(acquired_.load()),
                static_cast<unsigned long long>(raced_.load()));
    CHECK(acquired_.load() > 0);
  }

 private:
  Contents& contents(int slot) { return contents_[static_cast<std::size_t>(slot)]; }

  void read() {
    std::uint64_t newest = 0;
    std::uint64_t count = 0;
    while (!is_over_.load(std::memory_order_relaxed)) {
      const std::optional<int> slot = slot_.acquire();
      if (!slot) continue;
      newest = read_version(contents(*slot));
      // A request holds its reference for a while, and while others turn the slot.
      if (newest % 3 == 0) std::this_thread::yield();
      CHECK(read_version(contents(*slot)) == newest);
      slot_.release(*slot);
      if (count++ == 0) readers_begun_.fetch_add(1, std::memory_order_relaxed);
    }
    acquired_ += count;
  }

  void race(int seed) {
    std::uint64_t count = 0;
    for (unsigned i = static_cast<unsigned>(seed); !is_over_.load(std::memory_order_relaxed); ++i) {
      const int slot = static_cast<int>(i % Slot::kSlots);
      if (!slot_.try_acquire(slot)) continue;
      read_version(contents(slot));
      slot_.release(slot);
      ++count;
    }
    raced_ += count;
  }

  void vacate(int slot) {
    slot_.close(slot);
    while (!slot_.is_drained(slot)) std::this_thread::yield();
    contents(slot).fill(kPoison);
  }

  void write(int rounds, int readers) {
    int next = 0;
    // A busy machine may run this thread to its end before the others begin.
    for (int round = 1; round <= rounds || readers_begun_.load(std::memory_order_relaxed) < readers; ++round) {
      contents(next).fill(static_cast<std::uint64_t>(round));
      slot_.open(next);
      slot_.publish(next);
      CHECK(slot_.references(next) >= 0);
      const int before = 1 - next;
      if (round > 1) {
        if (round % 7 == 0) {  // a rollback, and forward again
          slot_.publish(before);
          slot_.publish(next);
        }
        vacate(before);
      }
      if (round % 11 == 0) {  // a cold change: for a while there is none
        slot_.retract();
        std::this_thread::yield();
        slot_.publish(next);
      }
      next = before;
    }
    slot_.retract();
    vacate(1 - next);
  }

  Slot slot_;
  std::array<Contents, Slot::kSlots> contents_;
  std::atomic<bool> is_over_{false};
  std::atomic<int> readers_begun_{0};
  std::atomic<std::uint64_t> acquired_{0};
  std::atomic<std::uint64_t> raced_{0};
};

}  // namespace changeover::stress
