// `ReadQueue`: reads of one thread that are under way together.
//
// With io_uring where the kernel allows it (Linux 5.6; containers often forbid it).  Elsewhere a read is
// done when it is waited for: then only several threads keep a disk busy.  Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace changeover {

class ReadQueue {
 public:
  // Room for `depth` reads, numbered from 0.
  explicit ReadQueue(unsigned depth);
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;
  ~ReadQueue();

  // Whether no read of this number was started, or it was waited for.
  bool is_idle(unsigned slot) const noexcept { return reads_[slot].state == State::idle; }
  // Known from the first `start` on: what reads no cold file takes nothing of the kernel.
  bool is_asynchronous() const noexcept { return ring_ != nullptr; }
  // Begin; `slot` must be idle, `to` and the fd stay untouched until `finish` or `drain`.
  void start(unsigned slot, int borrow_fd, std::uint64_t offset, std::span<std::byte> to);
  // Wait; bytes that were read (fewer at the end of the file), or an errno, negative.
  std::int64_t finish(unsigned slot);
  // Wait for all that were started, whatever becomes of them.
  void drain() noexcept;

 private:
  class Ring;
  enum class State { idle, waiting, under_way, done };  // waiting: nobody reads yet

  struct Read {
    State state = State::idle;
    int fd = -1;
    std::uint64_t offset = 0;
    std::span<std::byte> to;
    std::int64_t result = 0;
  };

  // Wait until the kernel reads nothing any more.
  void settle() noexcept;

  std::vector<Read> reads_;
  bool has_asked_ = false;
  std::unique_ptr<Ring> ring_;  // null where reads are synchronous
};

}  // namespace changeover
