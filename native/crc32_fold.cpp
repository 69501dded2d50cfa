#include "crc32_fold.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32_polynomial.hpp"

// Targets are set per function, not per file: an inline function of the standard library compiled
// here with AVX-512 could otherwise be the one copy that the linker keeps for everyone.
#define CHANGEOVER_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define CHANGEOVER_VPCLMUL256 __attribute__((target("pclmul,vpclmulqdq,avx2")))
#define CHANGEOVER_VPCLMUL512 __attribute__((target("pclmul,vpclmulqdq,avx512f,avx512vl,avx512dq")))

namespace changeover {
namespace {

using crc32_polynomial::fold_constant;

// One 128-bit lane moved onto `next`; its low half, the earlier one, goes 64 bits further.
CHANGEOVER_PCLMUL inline __m128i fold128(__m128i lane, __m128i constants, __m128i next) noexcept {
  const __m128i low = _mm_clmulepi64_si128(lane, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(lane, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

CHANGEOVER_VPCLMUL256 inline __m256i fold256(__m256i lanes, __m256i constants, __m256i next) noexcept {
  const __m256i low = _mm256_clmulepi64_epi128(lanes, constants, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(lanes, constants, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

CHANGEOVER_VPCLMUL512 inline __m512i fold512(__m512i lanes, __m512i constants, __m512i next) noexcept {
  const __m512i low = _mm512_clmulepi64_epi128(lanes, constants, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(lanes, constants, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // 0x96: exclusive or of all three
}

CHANGEOVER_PCLMUL inline __m128i load128(const std::byte* from) noexcept {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

CHANGEOVER_VPCLMUL256 inline __m256i load256(const std::byte* from) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

CHANGEOVER_VPCLMUL512 inline __m512i load512(const std::byte* from) noexcept {
  return _mm512_loadu_si512(from);
}

constexpr std::uint64_t kLow128 = fold_constant(128 + 32);
constexpr std::uint64_t kHigh128 = fold_constant(128 - 32);
constexpr std::uint64_t kLow256 = fold_constant(256 + 32);
constexpr std::uint64_t kHigh256 = fold_constant(256 - 32);
constexpr std::uint64_t kLow512 = fold_constant(512 + 32);
constexpr std::uint64_t kHigh512 = fold_constant(512 - 32);
constexpr std::uint64_t kLow1024 = fold_constant(1024 + 32);
constexpr std::uint64_t kHigh1024 = fold_constant(1024 - 32);
constexpr std::uint64_t kLow2048 = fold_constant(2048 + 32);
constexpr std::uint64_t kHigh2048 = fold_constant(2048 - 32);

}  // namespace

bool has_pclmul() noexcept {
  static const bool has = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return has;
}

bool has_vpclmul256() noexcept {
  static const bool has =
      has_pclmul() && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
  return has;
}

bool has_vpclmul512() noexcept {
  static const bool has = has_pclmul() && __builtin_cpu_supports("vpclmulqdq") &&
                          __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  return has;
}

CHANGEOVER_PCLMUL Folded fold_pclmul(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  const std::byte* from = bytes.data();
  const std::byte* const end = from + bytes.size();
  const __m128i by512 = _mm_set_epi64x(static_cast<long long>(kHigh512), static_cast<long long>(kLow512));
  const __m128i by128 = _mm_set_epi64x(static_cast<long long>(kHigh128), static_cast<long long>(kLow128));

  __m128i a = _mm_xor_si128(load128(from), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = load128(from + 16);
  __m128i c = load128(from + 32);
  __m128i d = load128(from + 48);
  for (from += 64; end - from >= 64; from += 64) {
    a = fold128(a, by512, load128(from));
    b = fold128(b, by512, load128(from + 16));
    c = fold128(c, by512, load128(from + 32));
    d = fold128(d, by512, load128(from + 48));
  }
  __m128i lane = fold128(fold128(fold128(a, by128, b), by128, c), by128, d);
  for (; from != end; from += 16) lane = fold128(lane, by128, load128(from));

  Folded folded;
  _mm_store_si128(reinterpret_cast<__m128i*>(folded.bytes), lane);
  return folded;
}

CHANGEOVER_VPCLMUL256 Folded fold_vpclmul256(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  const std::byte* from = bytes.data();
  const std::byte* const end = from + bytes.size();
  const __m128i by128 = _mm_set_epi64x(static_cast<long long>(kHigh128), static_cast<long long>(kLow128));
  const __m256i by256 = _mm256_broadcastsi128_si256(
      _mm_set_epi64x(static_cast<long long>(kHigh256), static_cast<long long>(kLow256)));
  const __m256i by1024 = _mm256_broadcastsi128_si256(
      _mm_set_epi64x(static_cast<long long>(kHigh1024), static_cast<long long>(kLow1024)));

  __m256i a = _mm256_xor_si256(load256(from),
                               _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
  __m256i b = load256(from + 32);
  __m256i c = load256(from + 64);
  __m256i d = load256(from + 96);
  for (from += 128; end - from >= 128; from += 128) {
    a = fold256(a, by1024, load256(from));
    b = fold256(b, by1024, load256(from + 32));
    c = fold256(c, by1024, load256(from + 64));
    d = fold256(d, by1024, load256(from + 96));
  }
  __m256i lanes = fold256(fold256(fold256(a, by256, b), by256, c), by256, d);
  for (; end - from >= 32; from += 32) lanes = fold256(lanes, by256, load256(from));

  __m128i lane = fold128(_mm256_castsi256_si128(lanes), by128, _mm256_extracti128_si256(lanes, 1));
  if (from != end) lane = fold128(lane, by128, load128(from));

  Folded folded;
  _mm_store_si128(reinterpret_cast<__m128i*>(folded.bytes), lane);
  return folded;
}

CHANGEOVER_VPCLMUL512 Folded fold_vpclmul512(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  const std::byte* from = bytes.data();
  const std::byte* const end = from + bytes.size();
  const __m128i by128 = _mm_set_epi64x(static_cast<long long>(kHigh128), static_cast<long long>(kLow128));
  const __m512i by512 = _mm512_broadcast_i64x2(
      _mm_set_epi64x(static_cast<long long>(kHigh512), static_cast<long long>(kLow512)));
  const __m512i by2048 = _mm512_broadcast_i64x2(
      _mm_set_epi64x(static_cast<long long>(kHigh2048), static_cast<long long>(kLow2048)));

  __m512i a = _mm512_xor_si512(load512(from),
                               _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  __m512i b = load512(from + 64);
  __m512i c = load512(from + 128);
  __m512i d = load512(from + 192);
  for (from += 256; end - from >= 256; from += 256) {
    a = fold512(a, by2048, load512(from));
    b = fold512(b, by2048, load512(from + 64));
    c = fold512(c, by2048, load512(from + 128));
    d = fold512(d, by2048, load512(from + 192));
  }
  __m512i lanes = fold512(fold512(fold512(a, by512, b), by512, c), by512, d);
  for (; end - from >= 64; from += 64) lanes = fold512(lanes, by512, load512(from));

  __m128i lane = _mm512_castsi512_si128(lanes);
  lane = fold128(lane, by128, _mm512_extracti64x2_epi64(lanes, 1));
  lane = fold128(lane, by128, _mm512_extracti64x2_epi64(lanes, 2));
  lane = fold128(lane, by128, _mm512_extracti64x2_epi64(lanes, 3));
  for (; from != end; from += 16) lane = fold128(lane, by128, load128(from));

  Folded folded;
  _mm_store_si128(reinterpret_cast<__m128i*>(folded.bytes), lane);
  return folded;
}

}  // namespace changeover

#endif
