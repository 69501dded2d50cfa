#include "sha256_compress.hpp"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

// Per function, not per file: see crc32_fold.cpp.
#define CHANGEOVER_SHANI __attribute__((target("sha,sse4.1,ssse3")))

namespace changeover {
namespace {

// Independent messages, their rounds interleaved.
template <std::size_t Streams>
CHANGEOVER_SHANI void compress(Sha256State* states, const std::byte* const* data, std::size_t blocks) noexcept {
  // Reverses the bytes of each 32-bit word.
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i abef[Streams];
  __m128i cdgh[Streams];
  for (std::size_t s = 0; s < Streams; ++s) {
    // The instructions want the state as (A, B, E, F) and (C, D, G, H), highest word first.
    const auto* words = reinterpret_cast<const __m128i*>(states[s].data());
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
    abef[s] = _mm_alignr_epi8(cdab, efgh, 8);
    cdgh[s] = _mm_blend_epi16(efgh, cdab, 0xF0);
  }

  for (std::size_t block = 0; block < blocks; ++block) {
    __m128i abef_before[Streams];
    __m128i cdgh_before[Streams];
    __m128i w[Streams][4];  // the last 16 words of the message schedule, as a ring
    for (std::size_t s = 0; s < Streams; ++s) {
      abef_before[s] = abef[s];
      cdgh_before[s] = cdgh[s];
    }
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kSha256Rounds.data()) + group);
#pragma GCC unroll 3
      for (std::size_t s = 0; s < Streams; ++s) {
        __m128i& words = w[s][group & 3];
        if (group < 4) {
          const auto* from = reinterpret_cast<const __m128i*>(data[s] + block * kSha256BlockBytes) + group;
          words = _mm_shuffle_epi8(_mm_loadu_si128(from), big_endian);
        } else {
          const __m128i last = w[s][(group + 3) & 3];
          const __m128i minus7 = _mm_alignr_epi8(last, w[s][(group + 2) & 3], 4);
          const __m128i partial = _mm_sha256msg1_epu32(words, w[s][(group + 1) & 3]);
          words = _mm_sha256msg2_epu32(_mm_add_epi32(partial, minus7), last);
        }
        const __m128i sum = _mm_add_epi32(words, k);
        cdgh[s] = _mm_sha256rnds2_epu32(cdgh[s], abef[s], sum);
        abef[s] = _mm_sha256rnds2_epu32(abef[s], cdgh[s], _mm_shuffle_epi32(sum, 0x0E));
      }
    }
    for (std::size_t s = 0; s < Streams; ++s) {
      abef[s] = _mm_add_epi32(abef[s], abef_before[s]);
      cdgh[s] = _mm_add_epi32(cdgh[s], cdgh_before[s]);
    }
  }

  for (std::size_t s = 0; s < Streams; ++s) {
    const __m128i feba = _mm_shuffle_epi32(abef[s], 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh[s], 0xB1);
    auto* words = reinterpret_cast<__m128i*>(states[s].data());
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
  }
}

}  // namespace

bool has_shani() noexcept {
  static const bool has = [] {
    // Not every supported compiler knows "sha" in __builtin_cpu_supports: leaf 7, EBX, bit 29.
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    return (ebx & (1U << 29)) != 0 && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
  }();
  return has;
}

void sha256_compress_shani(std::span<Sha256State> states, std::span<const std::byte* const> data,
                           std::size_t blocks) noexcept {
  static_assert(kShaniStreams == 3);
  if (states.size() == 3) return compress<3>(states.data(), data.data(), blocks);
  if (states.size() == 2) return compress<2>(states.data(), data.data(), blocks);
  compress<1>(states.data(), data.data(), blocks);
}

}  // namespace changeover

#endif
