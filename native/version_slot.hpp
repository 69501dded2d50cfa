// `VersionSlot`: the double buffer.  Two slots hold a version each; readers take references on the
// current one without waiting, a writer turns to the other one with one atomic exchange.
//
// Split reference counting.  `current_` is one word: which slot is current, and how many references
// were taken since it became so.  `acquire` adds one to it and learns from the same operation which
// slot it counted for, so there is no moment between "which" and "one more" (reading the index first
// and counting afterwards is the classic error: the slot may be drained and refilled in between).
// Each slot has a word of its own for what is given back.  While a slot is current the two words
// count apart and only their sum means something; when it stops being current, the exchange ends
// its first count for good and the writer adds it to the second.
//
//   current_   [ taken since publication : 54 | generation : 8 | slot, or 3 for none : 2 ]
//   slots_[i]  [ references, signed      : 54 | generation : 8 | published : 1 | closed : 1 ]
//
// The flags of a slot share a word with its count, hence no window between reading one and acting on
// the other: `try_acquire` cannot slip in after `close`, and `is_drained` cannot believe a zero which
// only lacks a count on its way over (`published` goes in the same addition that brings it).  The
// generation counts publications of a slot; equal generations mean that the two words belong to the
// same publication, so that their sum may be formed.  54 bits hold a million acquisitions a second
// for 285 years.
//
// Life of a slot: closed → open() → publish() → [another is published] → close() → is_drained() →
// closed, to be filled again.  publish() of a slot which is retained, not closed, is a rollback;
// reopen() gives up a drain that takes too long.
//
// `acquire` and `release` never wait.  Writers are meant to be one thread; several cannot corrupt
// anything, but one may be told of a misuse that is only the other's unfinished step.  A surplus
// release is noticed at the latest when the last true holder releases, and the error is raised to
// whoever is last: a count cannot know who broke the rule.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>

#include "error.hpp"

namespace changeover {

class VersionSlot {
 public:
  static constexpr int kSlots = 2;

  // Take a reference on the current version: its slot, or nothing if there is none.
  std::optional<int> acquire() noexcept {
    // acquire: pairs with the release in `turn_to`, so the version's contents are seen complete.
    const std::uint64_t before = current_.fetch_add(kUnit, std::memory_order_acquire);
    // Counted for "none", the reference is no one's: the next exchange drops it with the word.
    if (index_of(before) == kNone) return std::nullopt;
    return index_of(before);
  }

  // Take a reference on a slot by number, current or not; false if it is closed.
  bool try_acquire(int slot) {
    std::atomic<std::uint64_t>& word = slot_word(slot);
    // relaxed: only a guess for the exchange below, which decides.
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    while ((seen & kClosed) == 0) {
      // acquire: pairs with the release in `open` (through the read-modify-writes in between, which
      // continue its release sequence), so the version's contents are seen complete.
      if (word.compare_exchange_weak(seen, seen + kUnit, std::memory_order_acquire,
                                     std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

  // Give back one reference.  Throws Misuse, and changes nothing, where none can be out.
  void release(int slot) {
    std::atomic<std::uint64_t>& word = slot_word(slot);
    // release: what this reader read happens before whoever sees the slot drained reuses it.
    // acquire: every release counted before this one, and therefore the acquisition before it, is
    // visible, so that `overdrawn` cannot see the one without the other.
    const std::uint64_t after = word.fetch_sub(kUnit, std::memory_order_acq_rel) - kUnit;
    if (count_of(after) < 0 && overdrawn(slot, after)) {
      word.fetch_add(kUnit, std::memory_order_relaxed);  // undoes a count, guards no data
      throw Misuse("slot " + std::to_string(slot) + " is released more often than acquired");
    }
  }

  // Make `slot` the current one.  Throws Misuse if it is closed or current.
  void publish(int slot) {
    std::atomic<std::uint64_t>& word = slot_word(slot);
    std::uint64_t seen = word.load(std::memory_order_relaxed);  // a guess, as above
    std::uint64_t published = 0;
    do {
      if ((seen & kClosed) != 0) throw Misuse("slot " + std::to_string(slot) + " is published while closed");
      if ((seen & kPublished) != 0) throw Misuse("slot " + std::to_string(slot) + " is current already");
      const std::uint64_t generation = (seen + kGeneration) & kGenerationMask;
      published = (seen & ~kGenerationMask) | generation | kPublished;
      // acquire: pairs with the release in `open`, which may have been another thread's, so that the
      // exchange on `current_` hands on what that thread wrote.
    } while (!word.compare_exchange_weak(seen, published, std::memory_order_acquire,
                                         std::memory_order_relaxed));
    turn_to((published & kGenerationMask) | static_cast<std::uint64_t>(slot));
  }

  // Make none current; no effect if none is.
  void retract() noexcept { turn_to(kNone); }

  // Refuse new references by `try_acquire`.  Throws Misuse if the slot is current or closed.
  void close(int slot) {
    std::atomic<std::uint64_t>& word = slot_word(slot);
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    do {
      if ((seen & kPublished) != 0) throw Misuse("slot " + std::to_string(slot) + " is closed while current");
      if ((seen & kClosed) != 0) throw Misuse("slot " + std::to_string(slot) + " is closed twice");
      // relaxed: closing hands nothing over.  That no `try_acquire` succeeds afterwards follows from
      // the order of changes of this one word.
    } while (!word.compare_exchange_weak(seen, seen | kClosed, std::memory_order_relaxed,
                                         std::memory_order_relaxed));
  }

  // Admit references to a slot that was filled.  Throws Misuse unless it is drained.
  void open(int slot) {
    std::atomic<std::uint64_t>& word = slot_word(slot);
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    do {
      if (!is_drained_word(seen)) {
        throw Misuse("slot " + std::to_string(slot) + " is opened before it is drained");
      }
      // release: hands the contents to `try_acquire`.
    } while (!word.compare_exchange_weak(seen, seen & ~kClosed, std::memory_order_release,
                                         std::memory_order_relaxed));
  }

  // Take `close` back, contents unchanged, whoever still holds references.  Throws Misuse if open.
  void reopen(int slot) {
    std::atomic<std::uint64_t>& word = slot_word(slot);
    // relaxed: the contents were handed over by `open`; this continues its release sequence.
    if ((word.fetch_and(~kClosed, std::memory_order_relaxed) & kClosed) == 0) {
      throw Misuse("slot " + std::to_string(slot) + " is reopened while open");
    }
  }

  // Whether the slot is closed and no reference is left, so that its contents may be replaced.
  bool is_drained(int slot) const {
    // acquire: pairs with every `release` (each heads a release sequence that the later
    // read-modify-writes of the word continue), so all reads of the contents are over.
    return is_drained_word(slot_word(slot).load(std::memory_order_acquire));
  }

  // References out at some moment during the call; for status.  Waits for a `publish` under way.
  std::int64_t references(int slot) const {
    for (;;) {
      // acquire: the acquisitions of all releases in `word` are visible in `current` (see `release`).
      const std::uint64_t word = slot_word(slot).load(std::memory_order_acquire);
      if ((word & kPublished) == 0) return count_of(word);
      const std::uint64_t current = current_.load(std::memory_order_acquire);
      if (same_publication(slot, word, current)) return count_of(current) + count_of(word);
      std::this_thread::yield();
    }
  }

  // The current slot, or nothing; for status.
  std::optional<int> current() const noexcept {
    // acquire: whoever finds a slot current may look at its contents (if it keeps it alive).
    const int index = index_of(current_.load(std::memory_order_acquire));
    return index == kNone ? std::nullopt : std::optional(index);
  }

 private:
  static constexpr std::uint64_t kClosed = 1;
  static constexpr std::uint64_t kPublished = 2;
  static constexpr std::uint64_t kIndexMask = 3;
  static constexpr int kNone = 3;
  static constexpr std::uint64_t kGeneration = 1 << 2;
  static constexpr std::uint64_t kGenerationMask = 0xFF << 2;
  static constexpr std::uint64_t kUnit = 1 << 10;

  static constexpr int index_of(std::uint64_t word) noexcept { return static_cast<int>(word & kIndexMask); }
  // Arithmetic shift (C++20): the count of a slot is negative while references are given back
  // that the other word counted.
  static constexpr std::int64_t count_of(std::uint64_t word) noexcept {
    return static_cast<std::int64_t>(word) >> 10;
  }
  static constexpr bool is_drained_word(std::uint64_t word) noexcept {
    return (word & (kClosed | kPublished)) == kClosed && count_of(word) == 0;
  }
  static constexpr bool same_publication(int slot, std::uint64_t word, std::uint64_t current) noexcept {
    return index_of(current) == slot && (word & kGenerationMask) == (current & kGenerationMask);
  }

  void turn_to(std::uint64_t next) noexcept {
    // release: hands the contents of the slot to `acquire`.  acquire: keeps the addition below after
    // it, and orders this flip after the one whose word it takes.
    const std::uint64_t before = current_.exchange(next, std::memory_order_acq_rel);
    if (index_of(before) == kNone) return;
    // The count moves over and `published` goes, in one addition; both are known to be there.
    // release: continues the chain by which `release` can see what `current_` counted.
    slots_[static_cast<std::size_t>(index_of(before))].fetch_add(
        static_cast<std::uint64_t>(count_of(before)) * kUnit - kPublished, std::memory_order_acq_rel);
  }

  // Whether a slot whose word was `word` (count below zero) gave back more than was taken.
  bool overdrawn(int slot, std::uint64_t word) const noexcept {
    for (;;) {
      if (count_of(word) >= 0) return false;
      if ((word & kPublished) == 0) return true;
      const std::uint64_t current = current_.load(std::memory_order_acquire);
      if (same_publication(slot, word, current)) return count_of(current) + count_of(word) < 0;
      // A publication begins or ends right now; its last step changes the word.
      std::this_thread::yield();
      word = slots_[static_cast<std::size_t>(slot)].load(std::memory_order_acquire);
    }
  }

  std::atomic<std::uint64_t>& slot_word(int slot) {
    check(slot);
    return slots_[static_cast<std::size_t>(slot)];
  }
  const std::atomic<std::uint64_t>& slot_word(int slot) const {
    check(slot);
    return slots_[static_cast<std::size_t>(slot)];
  }
  static void check(int slot) {
    if (slot < 0 || slot >= kSlots) throw Misuse("there is no slot " + std::to_string(slot));
  }

  std::atomic<std::uint64_t> current_{kNone};
  std::array<std::atomic<std::uint64_t>, kSlots> slots_{kClosed, kClosed};

  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
};

}  // namespace changeover
