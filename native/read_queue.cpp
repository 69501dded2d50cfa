#include "read_queue.hpp"

#include <unistd.h>

#include <cerrno>

#include "error.hpp"
#include "unique_fd.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#define CHANGEOVER_IO_URING 1
#endif

namespace changeover {

#ifdef CHANGEOVER_IO_URING

namespace {

// Shared with the kernel.
class SharedPages {
 public:
  SharedPages(int fd, off_t what, std::size_t nbytes) : nbytes_(nbytes) {
    void* address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (address == MAP_FAILED) throw SystemError("mmap(io_uring)", errno);
    address_ = static_cast<std::byte*>(address);
  }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  ~SharedPages() { ::munmap(address_, nbytes_); }

  template <typename T>
  T* at(std::uint32_t offset) const noexcept {
    return reinterpret_cast<T*>(address_ + offset);
  }

 private:
  std::byte* address_;
  std::size_t nbytes_;
};

}  // namespace

// The kernel's two rings, as io_uring(7) describes them.
class ReadQueue::Ring {
 public:
  // Null where the kernel does not have it or forbids it.
  static std::unique_ptr<Ring> open(unsigned depth) {
    io_uring_params parameters{};
    UniqueFd fd(static_cast<int>(::syscall(__NR_io_uring_setup, depth, &parameters)));
    // The one feature says that the kernel has plain reads too (both are of 5.6).
    if (!fd || (parameters.features & IORING_FEAT_RW_CUR_POS) == 0) return nullptr;
    try {
      return std::unique_ptr<Ring>(new Ring(std::move(fd), parameters));
    } catch (const SystemError&) {
      return nullptr;
    }
  }

  // False where the kernel does not take it.
  bool submit(unsigned slot, const Read& read) noexcept {
    const std::uint32_t tail = *submitted_tail_;
    const std::uint32_t index = tail & submission_mask_;
    io_uring_sqe& entry = entries_[index];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ;
    entry.fd = read.fd;
    entry.off = read.offset;
    entry.addr = reinterpret_cast<std::uintptr_t>(read.to.data());
    entry.len = static_cast<std::uint32_t>(read.to.size());
    entry.user_data = slot;
    submission_indices_[index] = index;
    std::atomic_ref(*submitted_tail_).store(tail + 1, std::memory_order_release);
    if (enter(1, 0) == 1) return true;
    std::atomic_ref(*submitted_tail_).store(tail, std::memory_order_release);
    return false;
  }

  // Wait until at least one read has ended; what ended is noted.  False where waiting fails.
  bool reap(std::vector<Read>& reads) noexcept {
    std::uint32_t head = *completed_head_;
    if (head == completed_tail() && enter(0, 1) < 0) return false;
    for (const std::uint32_t tail = completed_tail(); head != tail; ++head) {
      const io_uring_cqe& entry = completions_[head & completion_mask_];
      reads[entry.user_data].result = entry.res;
      reads[entry.user_data].state = State::done;
    }
    std::atomic_ref(*completed_head_).store(head, std::memory_order_release);
    return true;
  }

 private:
  Ring(UniqueFd fd, const io_uring_params& parameters)
      : fd_(std::move(fd)),
        rings_(fd_.borrow(), IORING_OFF_SQ_RING,
               std::max<std::size_t>(
                   parameters.sq_off.array + parameters.sq_entries * sizeof(std::uint32_t),
                   parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe))),
        entry_pages_(fd_.borrow(), IORING_OFF_SQES, parameters.sq_entries * sizeof(io_uring_sqe)),
        submitted_tail_(rings_.at<std::uint32_t>(parameters.sq_off.tail)),
        submission_mask_(*rings_.at<std::uint32_t>(parameters.sq_off.ring_mask)),
        submission_indices_(rings_.at<std::uint32_t>(parameters.sq_off.array)),
        completed_head_(rings_.at<std::uint32_t>(parameters.cq_off.head)),
        completed_tail_(rings_.at<std::uint32_t>(parameters.cq_off.tail)),
        completion_mask_(*rings_.at<std::uint32_t>(parameters.cq_off.ring_mask)),
        completions_(rings_.at<io_uring_cqe>(parameters.cq_off.cqes)),
        entries_(entry_pages_.at<io_uring_sqe>(0)) {}

  std::uint32_t completed_tail() const noexcept {
    return std::atomic_ref(*completed_tail_).load(std::memory_order_acquire);
  }

  long enter(unsigned submit, unsigned wait) const noexcept {
    for (;;) {
      const long done = ::syscall(__NR_io_uring_enter, fd_.borrow(), submit, wait,
                                  wait > 0 ? IORING_ENTER_GETEVENTS : 0U, nullptr, 0);
      if (done >= 0 || errno != EINTR) return done;
    }
  }

  // Declared in the order in which they depend on each other.
  UniqueFd fd_;
  SharedPages rings_;
  SharedPages entry_pages_;
  std::uint32_t* submitted_tail_;
  std::uint32_t submission_mask_;
  std::uint32_t* submission_indices_;
  std::uint32_t* completed_head_;
  std::uint32_t* completed_tail_;
  std::uint32_t completion_mask_;
  io_uring_cqe* completions_;
  io_uring_sqe* entries_;
};

#else

class ReadQueue::Ring {
 public:
  static std::unique_ptr<Ring> open(unsigned) { return nullptr; }
  bool submit(unsigned, const Read&) noexcept { return false; }
  bool reap(std::vector<Read>&) noexcept { return false; }
};

#endif

ReadQueue::ReadQueue(unsigned depth) : reads_(depth) {}

ReadQueue::~ReadQueue() { drain(); }

void ReadQueue::start(unsigned slot, int borrow_fd, std::uint64_t offset, std::span<std::byte> to) {
  Read& read = reads_.at(slot);
  if (read.state != State::idle) throw Misuse("a read is started where one is under way");
  read = {State::waiting, borrow_fd, offset, to, 0};
  if (!has_asked_) {
    has_asked_ = true;
    ring_ = Ring::open(static_cast<unsigned>(reads_.size()));
  }
  if (ring_ == nullptr) return;
  if (ring_->submit(slot, read)) {
    read.state = State::under_way;
  } else {
    // Refused: this read and all later ones are synchronous.
    settle();
    ring_.reset();
  }
}

std::int64_t ReadQueue::finish(unsigned slot) {
  Read& read = reads_.at(slot);
  if (read.state == State::idle) throw Misuse("a read is finished that was not started");
  while (read.state == State::under_way) {
    if (!ring_->reap(reads_)) throw SystemError("io_uring_enter", errno);
  }
  while (read.state == State::waiting) {
    const ssize_t got = ::pread(read.fd, read.to.data(), read.to.size(), static_cast<off_t>(read.offset));
    if (got < 0 && errno == EINTR) continue;
    read.result = got < 0 ? -errno : got;
    read.state = State::done;
  }
  read.state = State::idle;
  return read.result;
}

void ReadQueue::drain() noexcept {
  settle();
  for (Read& read : reads_) read.state = State::idle;
}

void ReadQueue::settle() noexcept {
  for (const Read& read : reads_) {
    while (read.state == State::under_way && ring_->reap(reads_)) {
    }
  }
}

}  // namespace changeover
