#include "sha256.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "crc32.hpp"
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
  if (isa != ShaIsa::portable && has_shani()) {
    return sha256_compress_shani({&state, 1}, {&data, 1}, blocks);
  }
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
// What stays in the level 2 cache of a core: whole blocks of each of two, three or sixteen streams.
constexpr std::size_t kNearBytes = std::size_t{192} << 10;
static_assert(kNearBytes % (kSha256BlockBytes * kShaniStreams * kSha256Lanes) == 0);

using Sources = std::span<const std::byte* const>;

// The whole blocks of messages of the same length, by `compress(data, blocks)`.  With `crc`, the CRC-32 of the
// first `count` one after the other too, each few bytes while they are in the near caches.
void compress_messages(std::span<const std::byte*> data, std::size_t count, std::size_t nbytes,
                       std::uint32_t* crc, const auto& compress) noexcept {
  const std::size_t whole = nbytes / kSha256BlockBytes * kSha256BlockBytes;
  if (crc == nullptr) return compress(data, whole / kSha256BlockBytes);
  std::array<std::uint32_t, kSha256Lanes> crcs{};
  for (std::size_t done = 0; done < nbytes;) {
    const std::size_t step = std::min(kNearBytes / data.size(), nbytes - done);
    compress(data, step / kSha256BlockBytes);
    for (std::size_t i = 0; i < count; ++i) crcs[i] = crc32({data[i], step}, crcs[i]);
    for (const std::byte*& from : data) from += step;
    done += step;
  }
  for (std::size_t i = 0; i < count; ++i) *crc = crc32_combine(*crc, crcs[i], nbytes);
}

// A few messages of the same length, `nbytes` apart.
void sha256_streams(const std::byte* first, std::size_t count, std::size_t nbytes, std::byte* to,
                    std::uint32_t* crc) noexcept {
  std::array<Sha256State, kShaniStreams> states;
  std::array<Tail, kShaniStreams> tails;
  std::array<const std::byte*, kShaniStreams> data;
  std::array<const std::byte*, kShaniStreams> tail_data;
  for (std::size_t i = 0; i < count; ++i) {
    states[i] = kInitial;
    data[i] = first + i * nbytes;
    tails[i] = Tail({data[i], nbytes});
    tail_data[i] = tails[i].bytes.data();
  }
  const std::span<Sha256State> used(states.data(), count);
  compress_messages({data.data(), count}, count, nbytes, crc, [&](Sources from, std::size_t blocks) {
    sha256_compress_shani(used, from, blocks);
  });
  sha256_compress_shani(used, tail_data, tails[0].blocks);
  for (std::size_t i = 0; i < count; ++i, to += kSha256Bytes) write_digest(states[i], to);
}

// Up to 16 messages of the same length, `nbytes` apart.
void sha256_lanes(const std::byte* first, std::size_t count, std::size_t nbytes, std::byte* to,
                  std::uint32_t* crc) noexcept {
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
  compress_messages(data, count, nbytes, crc, [&](Sources from, std::size_t blocks) {
    sha256_compress_avx512(states, from, blocks);
  });
  sha256_compress_avx512(states, tail_data, tails[0].blocks);
  for (std::size_t lane = 0; lane < count; ++lane, to += kSha256Bytes) {
    Sha256State state;
    for (std::size_t word = 0; word < state.size(); ++word) state[word] = states.words[word][lane];
    write_digest(state, to);
  }
}
#endif

// Both walks of the leaves; `crc` is null where only digests are asked for.
void hash_leaves(std::span<const std::byte> bytes, std::uint64_t leaf_bytes, std::byte* to, ShaIsa isa,
                 std::uint32_t* crc) noexcept {
#if defined(__x86_64__)
  // Whole leaves, `most` at once as long as there are `least`.
  const auto hash_together = [&](std::uint64_t least, std::uint64_t most, const auto& hash) {
    for (std::uint64_t left = bytes.size() / leaf_bytes; left >= least;) {
      const std::uint64_t count = std::min(left, most);
      hash(bytes.data(), count, leaf_bytes, to, crc);
      bytes = bytes.subspan(count * leaf_bytes);
      to += count * kSha256Bytes;
      left -= count;
    }
  };
  // A lane costs the same whether it is used or not; with fewer, a few at a time are faster.
  if (isa == ShaIsa::avx512) hash_together(has_shani() ? kSha256Lanes / 2 : 1, kSha256Lanes, sha256_lanes);
  if (isa != ShaIsa::portable && has_shani()) hash_together(2, kShaniStreams, sha256_streams);
#endif
  while (!bytes.empty()) {
    const auto leaf = bytes.first(std::min<std::uint64_t>(leaf_bytes, bytes.size()));
    const Sha256Digest digest = sha256(leaf, isa);
    if (crc != nullptr) *crc = crc32(leaf, *crc);
    std::memcpy(to, digest.data(), digest.size());
    bytes = bytes.subspan(leaf.size());
    to += digest.size();
  }
}

// Which it is depends on the processor: sixteen lanes of AVX-512 are up to twice as fast as its unit for SHA-256 on
// Intel's, a sixth slower on AMD's Zen 4.  Half a millisecond.
ShaIsa find_fastest() noexcept {
  if (!is_available(ShaIsa::avx512)) return is_available(ShaIsa::shani) ? ShaIsa::shani : ShaIsa::portable;
  if (!is_available(ShaIsa::shani)) return ShaIsa::avx512;
  using Clock = std::chrono::steady_clock;
  constexpr std::uint64_t kLeafBytes = 4096;
  constexpr std::uint64_t kLeaves = 48;  // whole rounds of either
  static std::array<std::byte, kLeaves * kLeafBytes> bytes;
  std::array<std::byte, kLeaves * kSha256Bytes> digests;
  ShaIsa fastest = ShaIsa::shani;
  Clock::duration least = Clock::duration::max();
  for (const ShaIsa isa : {ShaIsa::avx512, ShaIsa::shani}) {
    for (int round = 0; round < 5; ++round) {
      const Clock::time_point began = Clock::now();
      hash_leaves(bytes, kLeafBytes, digests.data(), isa, nullptr);
      const Clock::duration taken = Clock::now() - began;
      if (taken < least) {
        least = taken;
        fastest = isa;
      }
    }
  }
  return fastest;
}

}  // namespace

bool is_available(ShaIsa isa) noexcept {
#if defined(__x86_64__)
  if (isa == ShaIsa::shani) return has_shani();
  if (isa == ShaIsa::avx512) return has_avx512();
#endif
  return isa == ShaIsa::portable;
}

ShaIsa best_sha_isa() noexcept {
  static const ShaIsa kBest = find_fastest();
  return kBest;
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
  hash_leaves(bytes, leaf_bytes, digests.data(), isa, nullptr);
}

std::uint32_t sha256_leaves_and_crc32(std::span<const std::byte> bytes, std::uint64_t leaf_bytes,
                                      std::span<std::byte> digests, std::uint32_t crc, ShaIsa isa) noexcept {
  hash_leaves(bytes, leaf_bytes, digests.data(), isa, &crc);
  return crc;
}

}  // namespace changeover
