#include "sha256.hpp"

#include <algorithm>
#include <cstring>

#include "sha256_compress.hpp"

namespace changeover {
namespace {

// FIPS 180-4, 5.3.3.
constexpr Sha256State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// What follows the last whole block: the rest, a one bit, zeros and the length in bits.
struct Tail {
  Tail() noexcept = default;
  explicit Tail(std::span<const std::byte> message) noexcept {
    const std::size_t rest = message.size() % kSha256BlockBytes;
    blocks = rest + 1 + 8 > kSha256BlockBytes ? 2 : 1;
    if (rest > 0) std::memcpy(bytes.data(), message.data() + (message.size() - rest), rest);
    bytes[rest] = std::byte{0x80};
    const std::uint64_t bits = __builtin_bswap64(std::uint64_t{message.size()} * 8);
    std::memcpy(bytes.data() + blocks * kSha256BlockBytes - sizeof bits, &bits, sizeof bits);
  }

  std::array<std::byte, 2 * kSha256BlockBytes> bytes{};
  std::size_t blocks = 0;
};

void compress(Sha256State& state, const std::byte* data, std::size_t blocks, ShaIsa isa) noexcept {
#if defined(__x86_64__)
  // One stream alone fills no lanes: the instructions made for it are faster.
  if (isa != ShaIsa::portable && has_shani()) return sha256_compress_shani(state, data, blocks);
#else
  static_cast<void>(isa);
#endif
  sha256_compress_portable(state, data, blocks);
}

void write_digest(const Sha256State& state, std::byte* to) noexcept {
  for (const std::uint32_t word : state) {
    const std::uint32_t big_endian = __builtin_bswap32(word);
    std::memcpy(to, &big_endian, sizeof big_endian);
    to += sizeof big_endian;
  }
}

#if defined(__x86_64__)
// Two messages of the same length.
void sha256_pair(const std::byte* first, const std::byte* second, std::size_t nbytes,
                 std::byte* to) noexcept {
  Sha256State first_state = kInitial;
  Sha256State second_state = kInitial;
  const Tail first_tail({first, nbytes});
  const Tail second_tail({second, nbytes});
  sha256_compress_shani_pair(first_state, first, second_state, second, nbytes / kSha256BlockBytes);
  sha256_compress_shani_pair(first_state, first_tail.bytes.data(), second_state, second_tail.bytes.data(),
                             first_tail.blocks);
  write_digest(first_state, to);
  write_digest(second_state, to + kSha256Bytes);
}

// Up to 16 messages of the same length, `nbytes` apart.
void sha256_lanes(const std::byte* first, std::size_t count, std::size_t nbytes, std::byte* to) noexcept {
  Sha256Lanes states;
  for (std::size_t word = 0; word < kInitial.size(); ++word) {
    std::fill_n(states.words[word], kSha256Lanes, kInitial[word]);
  }
  const std::byte* data[kSha256Lanes];
  const std::byte* tail_data[kSha256Lanes];
  std::array<Tail, kSha256Lanes> tails;
  for (std::size_t lane = 0; lane < kSha256Lanes; ++lane) {
    // A lane without a message of its own repeats the first.
    data[lane] = first + (lane < count ? lane * nbytes : 0);
    tails[lane] = Tail({data[lane], nbytes});
    tail_data[lane] = tails[lane].bytes.data();
  }
  sha256_compress_avx512(states, data, nbytes / kSha256BlockBytes);
  sha256_compress_avx512(states, tail_data, tails[0].blocks);
  for (std::size_t lane = 0; lane < count; ++lane, to += kSha256Bytes) {
    Sha256State state;
    for (std::size_t word = 0; word < state.size(); ++word) state[word] = states.words[word][lane];
    write_digest(state, to);
  }
}
#endif

}  // namespace

bool is_available(ShaIsa isa) noexcept {
#if defined(__x86_64__)
  if (isa == ShaIsa::shani) return has_shani();
  if (isa == ShaIsa::avx512) return has_avx512();
#endif
  return isa == ShaIsa::portable;
}

ShaIsa best_sha_isa() noexcept {
  for (const ShaIsa isa : {ShaIsa::avx512, ShaIsa::shani}) {
    if (is_available(isa)) return isa;
  }
  return ShaIsa::portable;
}

Sha256Digest sha256(std::span<const std::byte> bytes, ShaIsa isa) noexcept {
  Sha256State state = kInitial;
  const Tail tail(bytes);
  compress(state, bytes.data(), bytes.size() / kSha256BlockBytes, isa);
  compress(state, tail.bytes.data(), tail.blocks, isa);
  Sha256Digest digest;
  write_digest(state, digest.data());
  return digest;
}

void sha256_leaves(std::span<const std::byte> bytes, std::uint64_t leaf_bytes, std::span<std::byte> digests,
                   ShaIsa isa) noexcept {
  std::byte* to = digests.data();
#if defined(__x86_64__)
  if (isa == ShaIsa::avx512) {
    // A lane costs the same whether it is used or not; with fewer, pairs are faster.
    const std::size_t worth = has_shani() ? kSha256Lanes / 2 : 1;
    for (std::uint64_t left = bytes.size() / leaf_bytes; left >= worth;) {
      const std::uint64_t count = std::min<std::uint64_t>(left, kSha256Lanes);
      sha256_lanes(bytes.data(), count, leaf_bytes, to);
      bytes = bytes.subspan(count * leaf_bytes);
      to += count * kSha256Bytes;
      left -= count;
    }
  }
  if (isa != ShaIsa::portable && has_shani()) {
    while (bytes.size() / 2 >= leaf_bytes) {
      sha256_pair(bytes.data(), bytes.data() + leaf_bytes, leaf_bytes, to);
      bytes = bytes.subspan(2 * leaf_bytes);
      to += 2 * kSha256Bytes;
    }
  }
#endif
  while (!bytes.empty()) {
    const auto leaf = bytes.first(std::min<std::uint64_t>(leaf_bytes, bytes.size()));
    const Sha256Digest digest = sha256(leaf, isa);
    std::memcpy(to, digest.data(), digest.size());
    bytes = bytes.subspan(leaf.size());
    to += digest.size();
  }
}

}  // namespace changeover
