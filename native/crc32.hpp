// CRC-32 as IEEE 802.3 and zlib compute it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

// The instructions a checksum runs on; all give the same answer.
enum class CrcIsa { portable, pclmul, vpclmul256, vpclmul512 };

bool is_available(CrcIsa isa) noexcept;
CrcIsa best_crc_isa() noexcept;

// Go on from `crc` (0 at the start, as with zlib).  `isa` must be available.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc = 0) noexcept;
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc, CrcIsa isa) noexcept;

// The CRC of A followed by B, from their CRCs and the length of B.
std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) noexcept;

}  // namespace changeover
