// Checksums and digests of buffers that end where their memory ends, so that AddressSanitizer sees a
// byte too many; every instruction set against the portable one.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "check.hpp"
#include "crc32.hpp"
#include "sha256.hpp"

using namespace changeover;

namespace {

// A piece of the heap with exactly `skip + nbytes` bytes, of which the last `nbytes` count.
class Edge {
 public:
  Edge(std::size_t skip, std::size_t nbytes)
      : memory_(new std::byte[skip + nbytes]), skip_(skip), nbytes_(nbytes) {
    for (std::size_t i = 0; i < skip + nbytes; ++i) memory_[i] = static_cast<std::byte>(i * 131 + nbytes);
  }
  std::span<const std::byte> bytes() const { return {memory_.get() + skip_, nbytes_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t skip_;
  std::size_t nbytes_;
};

void checksums_agree(std::span<const std::byte> bytes) {
  const std::uint32_t expected = crc32(bytes, 7, CrcIsa::portable);
  for (const CrcIsa isa : {CrcIsa::pclmul, CrcIsa::vpclmul}) {
    if (is_available(isa)) CHECK(crc32(bytes, 7, isa) == expected);
  }
  const std::size_t half = bytes.size() / 2;
  const std::uint32_t second = crc32(bytes.subspan(half));
  CHECK(crc32_combine(crc32(bytes.first(half), 7), second, bytes.size() - half) == expected);
}

void digests_agree(std::span<const std::byte> bytes) {
  for (const ShaIsa isa : {ShaIsa::shani, ShaIsa::avx512}) {
    if (!is_available(isa)) continue;
    CHECK(sha256(bytes, isa) == sha256(bytes, ShaIsa::portable));
    for (const std::uint64_t leaf : {1, 20, 41, 55, 56, 63, 64, 65, 200}) {
      std::vector<std::byte> one(leaf_count(bytes.size(), leaf) * kSha256Bytes);
      std::vector<std::byte> other(one.size());
      sha256_leaves(bytes, leaf, one, isa);
      sha256_leaves(bytes, leaf, other, ShaIsa::portable);
      CHECK(one == other);
    }
  }
}

}  // namespace

int main() {
  for (std::size_t skip : {0, 1, 7}) {
    for (std::size_t nbytes = 0; nbytes < 700; ++nbytes) {
      const Edge edge(skip, nbytes);
      checksums_agree(edge.bytes());
      digests_agree(edge.bytes());
    }
  }
}
