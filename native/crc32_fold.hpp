// CRC-32 by carry-less multiplication, for x86-64 processors that have it.
//
// `crc` is the inner state (inverted).  Each function takes a length that is a multiple of 16 and at
// least its `k…MinimumBytes`; the caller has checked that the instructions are there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace changeover {

#if defined(__x86_64__)
inline constexpr std::size_t kPclmulMinimumBytes = 64;
inline constexpr std::size_t kVpclmul256MinimumBytes = 128;
inline constexpr std::size_t kVpclmul512MinimumBytes = 256;

bool has_pclmul() noexcept;
bool has_vpclmul256() noexcept;  // with AVX2
bool has_vpclmul512() noexcept;  // with AVX-512

// 16 bytes whose CRC (portable, from state 0) is that of all of `bytes` from state `crc`.
struct Folded {
  alignas(16) std::byte bytes[16];
};
Folded fold_pclmul(std::span<const std::byte> bytes, std::uint32_t crc) noexcept;
Folded fold_vpclmul256(std::span<const std::byte> bytes, std::uint32_t crc) noexcept;
Folded fold_vpclmul512(std::span<const std::byte> bytes, std::uint32_t crc) noexcept;
#endif

}  // namespace changeover
