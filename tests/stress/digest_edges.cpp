// Checksums and digests of buffers that end where their memory ends, so that AddressSanitizer sees a
// byte too many; every instruction set against the portable one.
#include <algorithm>
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
    // No two steps of a hash have the same bytes.
    for (std::size_t i = 0; i < skip + nbytes; ++i) {
      memory_[i] = static_cast<std::byte>((i * 2654435761U + nbytes) >> 13);
    }
  }
  std::span<const std::byte> bytes() const { return {memory_.get() + skip_, nbytes_}; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t skip_;
  std::size_t nbytes_;
};

void checksums_agree(std::span<const std::byte> bytes) {
  const std::uint32_t expected = crc32(bytes, 7, CrcIsa::portable);
  for (const CrcIsa isa : {CrcIsa::pclmul, CrcIsa::vpclmul256, CrcIsa::vpclmul512}) {
    if (is_available(isa)) CHECK(crc32(bytes, 7, isa) == expected);
  }
  const std::size_t half = bytes.size() / 2;
  const std::uint32_t second = crc32(bytes.subspan(half));
  CHECK(crc32_combine(crc32(bytes.first(half), 7), second, bytes.size() - half) == expected);
}

void digests_agree(std::span<const std::byte> bytes) {
  for (const ShaIsa isa : {ShaIsa::portable, ShaIsa::shani, ShaIsa::avx512}) {
    if (!is_available(isa)) continue;
    CHECK(sha256(bytes, isa) == sha256(bytes, ShaIsa::portable));
    for (const std::uint64_t leaf : {1, 20, 41, 55, 56, 63, 64, 65, 200}) {
      std::vector<std::byte> one(leaf_count(bytes.size(), leaf) * kSha256Bytes);
      std::vector<std::byte> other(one.size());
      sha256_leaves(bytes, leaf, one, isa);
      sha256_leaves(bytes, leaf, other, ShaIsa::portable);
      CHECK(one == other);
      std::vector<std::byte> both(one.size());
      CHECK(sha256_leaves_and_crc32(bytes, leaf, both, 7, isa) == crc32(bytes, 7, CrcIsa::portable));
      CHECK(both == other);
    }
  }
}

// Leaves of more than what is hashed before their checksum goes on, with each number of streams: 16, 3, 2 and 1.
void long_leaves_agree() {
  for (const std::uint64_t leaf : {98304, 98303, 200001}) {
    for (const std::size_t leaves : {1, 2, 3, 9, 19}) {
      const Edge edge(1, leaves * leaf + 5);
      std::vector<std::byte> expected((leaves + 1) * kSha256Bytes);
      for (std::size_t i = 0; i <= leaves; ++i) {
        const auto rest = edge.bytes().subspan(i * leaf);
        const Sha256Digest digest = sha256(rest.first(std::min<std::size_t>(leaf, rest.size())), best_sha_isa());
        std::memcpy(expected.data() + i * kSha256Bytes, digest.data(), digest.size());
      }
      for (const ShaIsa isa : {ShaIsa::shani, ShaIsa::avx512}) {
        if (!is_available(isa)) continue;
        std::vector<std::byte> found(expected.size());
        CHECK(sha256_leaves_and_crc32(edge.bytes(), leaf, found, 7, isa) == crc32(edge.bytes(), 7));
        CHECK(found == expected);
      }
    }
  }
}

}  // namespace

int main() {
  long_leaves_agree();
  for (std::size_t skip : {0, 1, 7}) {
    for (std::size_t nbytes = 0; nbytes < 700; ++nbytes) {
      const Edge edge(skip, nbytes);
      checksums_agree(edge.bytes());
      digests_agree(edge.bytes());
    }
  }
}
