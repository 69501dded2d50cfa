#include "crc32.hpp"

#include <bit>
#include <cstring>

#include "crc32_fold.hpp"
#include "crc32_polynomial.hpp"

namespace changeover {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

constexpr auto kTables = crc32_polynomial::make_tables<16>();
constexpr auto kBytePowers = crc32_polynomial::make_byte_powers();

std::uint32_t load32(const std::byte* from) noexcept {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Four bytes that are followed by `After` bytes of the same 16.
template <std::size_t After>
std::uint32_t slice(std::uint32_t word) noexcept {
  return kTables[After + 3][word & 0xFF] ^ kTables[After + 2][(word >> 8) & 0xFF] ^
         kTables[After + 1][(word >> 16) & 0xFF] ^ kTables[After][word >> 24];
}

// On the inner (inverted) state.
std::uint32_t update_portable(std::span<const std::byte> bytes, std::uint32_t state) noexcept {
  const std::byte* from = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 16; left -= 16, from += 16) {
    state = slice<12>(load32(from) ^ state) ^ slice<8>(load32(from + 4)) ^ slice<4>(load32(from + 8)) ^
            slice<0>(load32(from + 12));
  }
  for (; left > 0; --left, ++from) {
    state = (state >> 8) ^ kTables[0][(state ^ static_cast<std::uint32_t>(*from)) & 0xFF];
  }
  return state;
}

std::uint32_t update(std::span<const std::byte> bytes, std::uint32_t state, CrcIsa isa) noexcept {
#if defined(__x86_64__)
  const std::size_t whole = bytes.size() & ~std::size_t{15};
  if (isa == CrcIsa::vpclmul512 && whole >= kVpclmul512MinimumBytes) {
    const Folded folded = fold_vpclmul512(bytes.first(whole), state);
    return update_portable(bytes.subspan(whole), update_portable(folded.bytes, 0));
  }
  if (isa == CrcIsa::vpclmul256 && whole >= kVpclmul256MinimumBytes) {
    const Folded folded = fold_vpclmul256(bytes.first(whole), state);
    return update_portable(bytes.subspan(whole), update_portable(folded.bytes, 0));
  }
  if (isa != CrcIsa::portable && whole >= kPclmulMinimumBytes) {
    const Folded folded = fold_pclmul(bytes.first(whole), state);
    return update_portable(bytes.subspan(whole), update_portable(folded.bytes, 0));
  }
#else
  static_cast<void>(isa);
#endif
  return update_portable(bytes, state);
}

}  // namespace

bool is_available(CrcIsa isa) noexcept {
#if defined(__x86_64__)
  if (isa == CrcIsa::pclmul) return has_pclmul();
  if (isa == CrcIsa::vpclmul256) return has_vpclmul256();
  if (isa == CrcIsa::vpclmul512) return has_vpclmul512();
#endif
  return isa == CrcIsa::portable;
}

CrcIsa best_crc_isa() noexcept {
  for (const CrcIsa isa : {CrcIsa::vpclmul512, CrcIsa::vpclmul256, CrcIsa::pclmul}) {
    if (is_available(isa)) return isa;
  }
  return CrcIsa::portable;
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc, CrcIsa isa) noexcept {
  return ~update(bytes, ~crc, isa);
}

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  return crc32(bytes, crc, best_crc_isa());
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) noexcept {
  for (std::size_t k = 0; second_nbytes != 0; ++k, second_nbytes >>= 1) {
    if ((second_nbytes & 1) != 0) first = crc32_polynomial::multiply(first, kBytePowers[k]);
  }
  return first ^ second;
}

}  // namespace changeover
