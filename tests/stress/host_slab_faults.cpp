// Host slabs on a kernel that interrupts, answers short and fails; and while threads read and close.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "crc32.hpp"
#include "error.hpp"
#include "faulty_kernel.hpp"
#include "host_slab.hpp"
#include "memory_file.hpp"

using namespace changeover;
using namespace changeover::stress;

namespace {

constexpr std::uint64_t kSlabBytes = std::uint64_t{52} << 20;  // more than one block of pages

void reads_survive_interrupts_and_short_answers() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(3 * 1048576 + 5);
  const auto slab = WritableHostSlab::create(*budget, "slab", kSlabBytes);
  int calls = 0;
  fake_pread = [&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    if (++calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    return real_pread(fd, to, std::min<std::size_t>(nbytes, 10007), offset);
  };
  const std::uint64_t nbytes = file.bytes.size() - 3;
  CHECK(slab->read_file(file.fd.borrow(), 3, 1001, nbytes) == file.crc(3, nbytes));
  fake_pread = nullptr;
  CHECK(calls > 300);
  const auto sealed = slab->seal();
  CHECK(sealed->crc32(1001, nbytes) == file.crc(3, nbytes));
}

void read_errors_name_the_call() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(4096);
  const auto slab = WritableHostSlab::create(*budget, "slab", kSlabBytes);
  fake_pread = [](int, void*, std::size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  try {
    slab->read_file(file.fd.borrow(), 0, 0, 4096);
    CHECK(!"an EIO is an error");
  } catch (const SystemError& error) {
    CHECK(error.call() == "pread" && error.number() == EIO);
  }
  fake_pread = nullptr;
  try {
    slab->read_file(file.fd.borrow(), 4000, 0, 97);
    CHECK(!"an early end is an error");
  } catch (const SystemError& error) {
    CHECK(error.call() == "pread" && error.number() == 0);
  }
  CHECK_THROWS(slab->read_file(file.fd.borrow(), 0, kSlabBytes - 1, 2), Misuse);
  CHECK_THROWS(slab->read_file(file.fd.borrow(), 0, ~std::uint64_t{0}, 2), Misuse);
  CHECK_THROWS(slab->read_file(file.fd.borrow(), ~std::uint64_t{0}, 0, 2), Misuse);
}

void pages_that_cannot_be_had_are_an_error_of_who_fills() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(4096);
  const std::size_t before = open_fds();
  int interrupted = 0;
  fake_fallocate = [&](int fd, int mode, off_t offset, off_t nbytes) -> int {
    if (++interrupted == 1) {
      errno = EINTR;
      return -1;
    }
    if (offset < off_t{32} << 20) return real_fallocate(fd, mode, offset, nbytes);
    errno = ENOSPC;
    return -1;
  };
  const auto fails = [](const auto& call) {
    try {
      call();
      CHECK(!"pages that cannot be had are an error");
    } catch (const SystemError& error) {
      CHECK(error.call() == "fallocate" && error.number() == ENOSPC);
    }
  };
  const auto slab = WritableHostSlab::create(*budget, "slab", kSlabBytes);
  CHECK(slab->missing_bytes() == kSlabBytes);
  CHECK(slab->read_file(file.fd.borrow(), 0, 0, 4096) == file.crc(0, 4096));
  CHECK(slab->missing_bytes() == kSlabBytes - (std::uint64_t{32} << 20));
  // Nothing is lost: whoever comes next asks again.
  for (int i = 0; i < 2; ++i) fails([&] { slab->read_file(file.fd.borrow(), 0, kSlabBytes - 4096, 4096); });
  CHECK(slab->read_file(file.fd.borrow(), 0, 4096, 4096) == file.crc(0, 4096));
  fails([&] { slab->seal(); });
  fake_fallocate = nullptr;
  CHECK(interrupted > 1 && !slab->is_open());
  CHECK(open_fds() == before && budget->used_bytes() == 0);
  // The id is free again.
  WritableHostSlab::create(*budget, "slab", 4096)->close();
  CHECK(open_fds() == before && budget->used_bytes() == 0);
}

void threads_take_pages_together() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(1 << 20);
  const auto slab = WritableHostSlab::create(*budget, "slab", kSlabBytes);
  {
    std::vector<std::jthread> readers;
    for (std::uint64_t part = 0; part < 8; ++part) {  // over the border of two blocks
      readers.emplace_back([&, part] {
        const std::uint64_t offset = (std::uint64_t{28} << 20) + (part << 20);
        CHECK(slab->read_file(file.fd.borrow(), 0, offset, 1 << 20) == file.crc(0, 1 << 20));
      });
    }
  }
  CHECK(slab->missing_bytes() == 0);
  const auto sealed = slab->seal();
  for (std::uint64_t part = 0; part < 8; ++part) {
    CHECK(sealed->crc32((std::uint64_t{28} << 20) + (part << 20), 1 << 20) == file.crc(0, 1 << 20));
  }
}

void a_read_under_way_keeps_seal_away_and_survives_close() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(4096);
  const auto slab = WritableHostSlab::create(*budget, "slab", kSlabBytes);
  std::latch is_reading(1);
  std::latch is_closed(1);
  fake_pread = [&](int fd, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
    is_reading.count_down();
    is_closed.wait();
    return real_pread(fd, to, nbytes, offset);
  };
  std::thread reader([&] { CHECK(slab->read_file(file.fd.borrow(), 0, 0, 4096) == file.crc(0, 4096)); });
  is_reading.wait();
  CHECK_THROWS(slab->seal(), Misuse);
  CHECK(slab->is_open());
  slab->close();
  CHECK(budget->used_bytes() == kSlabBytes);  // the memory is there as long as someone writes to it
  is_closed.count_down();
  reader.join();
  fake_pread = nullptr;
  CHECK(budget->used_bytes() == 0);
  CHECK_THROWS(slab->close(), Misuse);
  CHECK_THROWS(slab->seal(), Misuse);
  CHECK_THROWS(slab->read_file(file.fd.borrow(), 0, 0, 1), Misuse);
}

void readers_race_with_close() {
  const auto budget = std::make_shared<Budget>(std::nullopt);
  const File file(8 * 65536);
  const std::size_t before = open_fds();
  for (int round = 0; round < 50; ++round) {
    const auto writable = WritableHostSlab::create(*budget, "slab", file.bytes.size());
    {
      std::vector<std::jthread> writers;
      for (std::uint64_t part = 0; part < 8; ++part) {
        writers.emplace_back([&, part] {
          const std::uint64_t offset = part * 65536;
          CHECK(writable->read_file(file.fd.borrow(), offset, offset, 65536) == file.crc(offset, 65536));
        });
      }
    }
    const auto slab = writable->seal();
    const auto copy = HostSlab::import(*budget, "slab", slab->nbytes(), UniqueFd(::dup(slab->borrow_fd())));
    const std::uint32_t expected = file.crc(0, file.bytes.size());
    std::latch have_started(3);
    std::vector<std::jthread> readers;
    for (int i = 0; i < 3; ++i) {
      readers.emplace_back([&] {
        const auto kept = copy->share();
        have_started.count_down();
        try {
          for (;;) CHECK(copy->crc32(0, copy->nbytes()) == expected);
        } catch (const Misuse&) {  // closed; what is kept is still there
          CHECK(crc32(kept->mapping.range(0, copy->nbytes())) == expected);
        }
      });
    }
    have_started.wait();
    copy->close();
    readers.clear();
    CHECK(budget->used_bytes() == file.bytes.size());
    slab->close();
    CHECK(budget->used_bytes() == 0);
  }
  CHECK(open_fds() == before);
}

}  // namespace

int main() {
  reads_survive_interrupts_and_short_answers();
  read_errors_name_the_call();
  pages_that_cannot_be_had_are_an_error_of_who_fills();
  threads_take_pages_together();
  a_read_under_way_keeps_seal_away_and_survives_close();
  readers_race_with_close();
}
