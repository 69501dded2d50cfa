#include "extent_reader.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <limits>
#include <string>

#include "crc32.hpp"
#include "error.hpp"
#include "page_cache.hpp"
#include "unique_fd.hpp"

namespace changeover {
namespace {

// Small enough for the level 2 cache of the core that reads, so that the checksum finds the bytes
// there; large enough that the system call does not count.
constexpr std::size_t kStepBytes = std::size_t{512} << 10;

constexpr std::uint64_t round_down(std::uint64_t value) { return value / kDirectAlignment * kDirectAlignment; }
constexpr std::uint64_t round_up(std::uint64_t value) { return round_down(value + kDirectAlignment - 1); }

// Fill `to`; `done` of its bytes are there already.  Computes the checksum step by step, on from `crc`.
std::uint32_t read_rest(int fd, std::uint64_t file_offset, std::span<std::byte> to, std::uint64_t done,
                        std::uint32_t crc) {
  for (std::uint64_t seen = 0; seen < to.size();) {
    const std::uint64_t step = std::min<std::uint64_t>(kStepBytes, to.size() - seen);
    while (done < seen + step) {
      const auto rest = to.subspan(done, seen + step - done);
      const ssize_t got = ::pread(fd, rest.data(), rest.size(), static_cast<off_t>(file_offset + done));
      if (got < 0) {
        if (errno == EINTR) continue;
        throw ReadError("pread", errno, file_offset + done);
      }
      if (got == 0) throw ReadError::ends_early("pread", file_offset + done, to.size() - done);
      done += static_cast<std::uint64_t>(got);
    }
    crc = crc32(to.subspan(seen, step), crc);
    seen += step;
  }
  return crc;
}

}  // namespace

// Walks along the pieces as the file's bytes come.
class ExtentReader::PieceWalk {
 public:
  explicit PieceWalk(std::span<Piece> pieces) : pieces_(pieces) {}

  // Call `visit(piece, start, nbytes, offset)` for each piece that has some of the next `nbytes` bytes: from
  // `start` of them on, to `offset` of the destination.
  void next(std::uint64_t nbytes, const auto& visit) {
    for (std::uint64_t start = 0; start < nbytes;) {
      Piece& piece = pieces_.front();
      const std::uint64_t part = std::min(nbytes - start, piece.nbytes - done_);
      if (part > 0) visit(piece, start, part, piece.offset + done_);
      start += part;
      done_ += part;
      if (done_ == piece.nbytes) {
        pieces_ = pieces_.subspan(1);
        done_ = 0;
      }
    }
  }

 private:
  std::span<Piece> pieces_;
  std::uint64_t done_ = 0;  // of the first piece
};

// The file, and what was found out about it.
class ExtentReader::Source {
 public:
  explicit Source(int borrow_fd) : fd(borrow_fd), lives_in_memory(changeover::lives_in_memory(borrow_fd)) {}

  // Opened when it is first needed: a second description of the same file, whatever its name is now.
  // Negative where there is no direct I/O.
  int direct_fd() {
    if (!has_tried_) {
      has_tried_ = true;
      const std::string path = "/proc/self/fd/" + std::to_string(fd);
      direct_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    }
    return direct_ ? direct_.borrow() : -1;
  }
  bool has_direct() { return !is_direct_refused_ && direct_fd() >= 0; }
  void give_up_direct() noexcept { is_direct_refused_ = true; }

  // Bytes of one chunk after the other went through the page cache and are to leave it.  A page may be
  // larger than a chunk, so all that came before in a row is let go of again.
  void pass_through(const Chunk& chunk) noexcept;
  // From now on a read brings in what it asks for and no pages ahead, which nobody would drop.
  void expect_no_more() noexcept {
    static_cast<void>(::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM));
  }

  const int fd;
  const bool lives_in_memory;

 private:
  std::uint64_t passing_from_ = 0;
  std::uint64_t passing_to_ = 0;
  bool has_tried_ = false;
  bool is_direct_refused_ = false;
  UniqueFd direct_;
};

// What goes through a slot at once.
struct ExtentReader::Chunk {
  std::uint64_t offset;  // in the file
  std::uint64_t nbytes;
  bool is_cached = true;
  bool is_direct = false;  // a direct read was started
  unsigned slot = 0;       // that it reads into
  std::span<std::byte> memory = {};
};

void ExtentReader::Source::pass_through(const Chunk& chunk) noexcept {
  if (chunk.offset != passing_to_ || passing_to_ == 0) passing_from_ = round_down(chunk.offset);
  passing_to_ = chunk.offset + chunk.nbytes;
  drop_cached(fd, passing_from_, round_up(passing_to_) - passing_from_);
}

ExtentReader::ExtentReader(ReadQueue& queue, Slots& slots) : queue_(queue), slots_(slots) {}

void ExtentReader::read(int borrow_fd, std::uint64_t file_offset, std::span<Piece> pieces) {
  constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  std::uint64_t nbytes = 0;
  for (Piece& piece : pieces) {
    if (piece.nbytes > kLargestOffset - nbytes) throw Misuse("pieces that no file could fill");
    nbytes += piece.nbytes;
    piece.crc = 0;
  }
  if (file_offset > kLargestOffset || nbytes > kLargestOffset - file_offset) {
    throw Misuse("a file has no byte " + std::to_string(file_offset) + " + " + std::to_string(nbytes));
  }
  if (nbytes == 0) return;

  Source source(borrow_fd);
  struct Drain {  // the kernel must not write to slots that this call has left
    ReadQueue& queue;
    ~Drain() { queue.drain(); }
  } const drain{queue_};

  const std::uint64_t end = file_offset + nbytes;
  const std::uint64_t chunk_bytes = slots_.chunk_bytes();
  PieceWalk walk(pieces);
  std::deque<Chunk> ahead;
  while (file_offset < end || !ahead.empty()) {
    // Only direct reads are begun ahead: what is cached is there anyway, and taking its slot now could mean
    // to wait for a copy that would run meanwhile.
    while (file_offset < end && ahead.size() < slots_.count() && (ahead.empty() || ahead.back().is_direct)) {
      Chunk& chunk = ahead.emplace_back(Chunk{file_offset, std::min(chunk_bytes, end - file_offset)});
      file_offset += chunk.nbytes;
      chunk.is_cached = source.lives_in_memory || is_cached(borrow_fd, chunk.offset, chunk.nbytes);
      if (!chunk.is_cached && source.has_direct()) start(source, chunk);
    }
    const Chunk chunk = ahead.front();
    ahead.pop_front();
    finish(source, chunk, walk);
  }
}

unsigned ExtentReader::take_slot() {
  for (;;) {
    // The lowest: what was filled a moment ago is still in the processor's cache, and is filled the faster.
    for (unsigned slot = 0; slot < slots_.count(); ++slot) {
      if (queue_.is_idle(slot) && slots_.is_free(slot)) return slot;
    }
    slots_.wait_a_moment();
  }
}

void ExtentReader::start(Source& source, Chunk& chunk) {
  chunk.is_direct = true;
  chunk.slot = take_slot();
  chunk.memory = slots_.reuse(chunk.slot);
  const std::uint64_t from = round_down(chunk.offset);
  queue_.start(chunk.slot, source.direct_fd(), from,
               chunk.memory.first(round_up(chunk.offset + chunk.nbytes) - from));
}

void ExtentReader::finish(Source& source, Chunk chunk, PieceWalk& walk) {
  std::uint64_t done = 0;
  if (chunk.is_direct) {
    const std::int64_t got = queue_.finish(chunk.slot);
    if (got == -EINVAL || got == -EFAULT || got == -EOPNOTSUPP) {
      source.give_up_direct();  // opened, and yet not possible: read as usual from here on
    } else if (got < 0 && got != -EAGAIN && got != -EINTR) {
      throw ReadError("pread", static_cast<int>(-got), chunk.offset);
    } else if (got > 0) {
      const std::uint64_t skipped = chunk.offset - round_down(chunk.offset);
      const auto brought = static_cast<std::uint64_t>(got);
      done = std::min(brought > skipped ? brought - skipped : 0, chunk.nbytes);
    }
  }
  // What direct I/O did not bring is read as usual: everything without it, the end of a shrunken file with it.
  const bool is_passing_through = !chunk.is_cached && done == 0;
  if (is_passing_through) source.expect_no_more();
  walk.next(chunk.nbytes, [&](Piece& piece, std::uint64_t start, std::uint64_t nbytes, std::uint64_t offset) {
    std::span<std::byte> to;
    if (!chunk.is_direct) to = slots_.in_place(offset, nbytes);
    const bool is_in_place = !to.empty();
    if (!is_in_place) {
      if (chunk.memory.empty()) {
        chunk.slot = take_slot();
        chunk.memory = slots_.reuse(chunk.slot);
      }
      to = chunk.memory.subspan(chunk.offset - round_down(chunk.offset) + start, nbytes);
    }
    const std::uint64_t there = done > start ? std::min(done - start, nbytes) : 0;
    piece.crc = read_rest(source.fd, chunk.offset + start, to, there, piece.crc);
    if (!is_in_place) slots_.place(chunk.slot, to, offset);
  });
  if (is_passing_through) source.pass_through(chunk);
}

}  // namespace changeover
