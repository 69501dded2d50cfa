#include "sha256_compress.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

// Per function, not per file: see crc32_fold.cpp.
#define CHANGEOVER_AVX512 __attribute__((target("avx512f,avx512bw")))

namespace changeover {
namespace {

constexpr std::size_t kLanes = kSha256Lanes;

// How far ahead each stream is fetched: the processor does not keep up with sixteen by itself.
constexpr std::size_t kAheadBytes = 4 * kSha256BlockBytes;

CHANGEOVER_AVX512 inline __m512i xor3(__m512i a, __m512i b, __m512i c) noexcept {
  return _mm512_ternarylogic_epi32(a, b, c, 0x96);
}

// Rows of 16 words become columns: row `lane`, word `t` to row `t`, word `lane`.
CHANGEOVER_AVX512 inline void transpose(__m512i (&rows)[kLanes]) noexcept {
  __m512i pairs[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  __m512i quads[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const __m512i even_low = _mm512_shuffle_i32x4(quads[t], quads[t + 4], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(quads[t + 8], quads[t + 12], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(quads[t], quads[t + 4], 0xDD);
    const __m512i odd_high = _mm512_shuffle_i32x4(quads[t + 8], quads[t + 12], 0xDD);
    rows[t] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[t + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    rows[t + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[t + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

}  // namespace

bool has_avx512() noexcept {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  return has;
}

CHANGEOVER_AVX512 void sha256_compress_avx512(Sha256Lanes& states, std::span<const std::byte* const> data,
                                              std::size_t blocks) noexcept {
  const __m512i big_endian = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
  __m512i state[8];
  for (int i = 0; i < 8; ++i) state[i] = _mm512_load_si512(states.words[i]);

  for (std::size_t block = 0; block < blocks; ++block) {
    __m512i w[16];  // word t of all lanes; the last 16 of the message schedule, as a ring
#pragma GCC unroll 16
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::byte* const from = data[lane] + block * kSha256BlockBytes;
      w[lane] = _mm512_loadu_si512(from);
      _mm_prefetch(reinterpret_cast<const char*>(from) + kAheadBytes, _MM_HINT_T0);
    }
    transpose(w);
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) w[t] = _mm512_shuffle_epi8(w[t], big_endian);

    __m512i a = state[0], b = state[1], c = state[2], d = state[3];
    __m512i e = state[4], f = state[5], g = state[6], h = state[7];
#pragma GCC unroll 4
    for (std::size_t group = 0; group < 64; group += 16) {
#pragma GCC unroll 16
      for (std::size_t i = 0; i < 16; ++i) {
        if (group > 0) {
          const __m512i w15 = w[(i + 1) & 15];
          const __m512i w2 = w[(i + 14) & 15];
          const __m512i s0 = xor3(_mm512_ror_epi32(w15, 7), _mm512_ror_epi32(w15, 18), _mm512_srli_epi32(w15, 3));
          const __m512i s1 = xor3(_mm512_ror_epi32(w2, 17), _mm512_ror_epi32(w2, 19), _mm512_srli_epi32(w2, 10));
          w[i] = _mm512_add_epi32(_mm512_add_epi32(w[i], s0), _mm512_add_epi32(w[(i + 9) & 15], s1));
        }
        const __m512i k = _mm512_set1_epi32(static_cast<int>(kSha256Rounds[group + i]));
        const __m512i sum1 = xor3(_mm512_ror_epi32(e, 6), _mm512_ror_epi32(e, 11), _mm512_ror_epi32(e, 25));
        const __m512i choose = _mm512_ternarylogic_epi32(e, f, g, 0xCA);
        // Added in the order in which the terms are ready: each round waits for `e` and `a` of the last.
        const __m512i early = _mm512_add_epi32(_mm512_add_epi32(h, k), w[i]);
        const __m512i early_d = _mm512_add_epi32(early, d);
        const __m512i t1 = _mm512_add_epi32(_mm512_add_epi32(early, choose), sum1);
        const __m512i sum0 = xor3(_mm512_ror_epi32(a, 2), _mm512_ror_epi32(a, 13), _mm512_ror_epi32(a, 22));
        const __m512i majority = _mm512_ternarylogic_epi32(a, b, c, 0xE8);
        h = g;
        g = f;
        f = e;
        e = _mm512_add_epi32(_mm512_add_epi32(early_d, choose), sum1);
        d = c;
        c = b;
        b = a;
        a = _mm512_add_epi32(_mm512_add_epi32(t1, majority), sum0);
      }
    }
    const __m512i added[8] = {a, b, c, d, e, f, g, h};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) state[i] = _mm512_add_epi32(state[i], added[i]);
  }
  for (int i = 0; i < 8; ++i) _mm512_store_si512(states.words[i], state[i]);
}

}  // namespace changeover

#endif
