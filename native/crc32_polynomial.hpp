// Arithmetic modulo the CRC-32 polynomial, bit-reflected: bit 31 is the coefficient of x^0.
//
// All tables and folding constants are computed from here at compile time, so that there is one
// number in this code which has to be right.
#pragma once

#include <array>
#include <cstdint>

namespace changeover::crc32_polynomial {

inline constexpr std::uint32_t kPolynomial = 0xEDB88320;
inline constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t a) noexcept {
  return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0);
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^exponent by repeated multiplication: for compile time.
constexpr std::uint32_t power_of_x(unsigned exponent) noexcept {
  std::uint32_t power = kOne;
  for (unsigned i = 0; i < exponent; ++i) power = times_x(power);
  return power;
}

// What a reflected 64-bit half is multiplied with to move it by `exponent` bits.  The carry-less
// product of two reflected numbers comes out one bit too low, hence the shift.
constexpr std::uint64_t fold_constant(unsigned exponent) noexcept {
  return std::uint64_t{power_of_x(exponent)} << 1;
}

// The constants that Intel's white paper on CRC with PCLMULQDQ gives for this polynomial.
static_assert(fold_constant(4 * 128 + 32) == 0x154442bd4);
static_assert(fold_constant(4 * 128 - 32) == 0x1c6e41596);
static_assert(fold_constant(128 + 32) == 0x1751997d0);
static_assert(fold_constant(128 - 32) == 0x0ccaa009e);

// Slice s: the effect of one byte that is followed by s zero bytes.
template <std::size_t Slices>
constexpr std::array<std::array<std::uint32_t, 256>, Slices> make_tables() noexcept {
  std::array<std::array<std::uint32_t, 256>, Slices> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < Slices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

// x^(8 * 2^k), to move a CRC over 2^k bytes of zeros.
constexpr std::array<std::uint32_t, 64> make_byte_powers() noexcept {
  std::array<std::uint32_t, 64> powers{};
  powers[0] = power_of_x(8);
  for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}

}  // namespace changeover::crc32_polynomial
