// SHA-256 (FIPS 180-4) of whole buffers and of their leaves, alone or with a checksum.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

inline constexpr std::size_t kSha256Bytes = 32;
inline constexpr std::size_t kSha256BlockBytes = 64;

using Sha256State = std::array<std::uint32_t, 8>;
using Sha256Digest = std::array<std::byte, kSha256Bytes>;

// The instructions a digest runs on; all give the same answer.
enum class ShaIsa { portable, shani, avx512 };

bool is_available(ShaIsa isa) noexcept;
// The fastest one for leaves, by a trial at the first call.
ShaIsa best_sha_isa() noexcept;

// `isa` must be available.
Sha256Digest sha256(std::span<const std::byte> bytes, ShaIsa isa) noexcept;

// Leaves that `nbytes` are cut into: all of `leaf_bytes` (> 0) but the last, which may be short.
constexpr std::uint64_t leaf_count(std::uint64_t nbytes, std::uint64_t leaf_bytes) noexcept {
  return nbytes / leaf_bytes + (nbytes % leaf_bytes != 0 ? 1 : 0);
}

// The digest of each leaf, one after the other, into `digests` (32 bytes per leaf).
void sha256_leaves(std::span<const std::byte> bytes, std::uint64_t leaf_bytes, std::span<std::byte> digests,
                   ShaIsa isa) noexcept;

// The same, and the CRC-32 of all of `bytes`, on from `crc` (0 at the start): both while the bytes are at hand.
std::uint32_t sha256_leaves_and_crc32(std::span<const std::byte> bytes, std::uint64_t leaf_bytes,
                                      std::span<std::byte> digests, std::uint32_t crc, ShaIsa isa) noexcept;

}  // namespace changeover
