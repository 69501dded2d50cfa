// SHA-256 (FIPS 180-4) of the leaves of ranges of device memory, one thread per leaf.
//
// A leaf is hashed in order, so that one range keeps the device busy only if it has tens of thousands of
// them: many ranges go into one launch.  For the same reason a launch over whole leaves takes milliseconds
// however few they are, and whoever else uses the device waits that long: leaves can be hashed in slices, a
// launch for each, with the state of each leaf kept where its digest will be.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ const u32 kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy_async(uint4* to_shared, const uint4* from) {
  const u32 to = (u32)__cvta_generic_to_shared(to_shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Of this thread, since it said so last.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}
#else
__device__ __forceinline__ void copy_async(uint4* to_shared, const uint4* from) { *to_shared = __ldg(from); }
__device__ __forceinline__ void end_copies() {}
template <int groups>
__device__ __forceinline__ void wait_for_all_but() {}
#endif
#endif

__device__ __forceinline__ u32 rotate(u32 x, int by) { return __funnelshift_r(x, x, by); }
__device__ __forceinline__ u32 big_endian(u32 x) { return __byte_perm(x, 0, 0x0123); }

// `one` is 1, which the compiler must not know: an addition with a product in it goes to the pipe of
// multiplications, and the one of rotations and logic, which is the limit, has a quarter less to do.
__device__ __forceinline__ void compress(u32 (&h)[8], u32 (&w)[16], u32 one) {
  u32 a = h[0], b = h[1], c = h[2], d = h[3], e = h[4], f = h[5], g = h[6], i = h[7];
#pragma unroll
  for (int round = 0; round < 64; ++round) {
    if (round >= 16) {
      const u32 x = w[(round + 1) & 15];
      const u32 y = w[(round + 14) & 15];
      const u32 small0 = rotate(x, 7) ^ rotate(x, 18) ^ (x >> 3);
      const u32 small1 = rotate(y, 17) ^ rotate(y, 19) ^ (y >> 10);
      w[round & 15] = ((w[round & 15] * one + w[(round + 9) & 15]) * one + small0) * one + small1;
    }
    // Added in the order in which the terms are ready: with few leaves, a round waits for the one before it.
    const u32 early = (w[round & 15] * one + kRound[round]) * one + i;
    const u32 choose = (e & f) ^ (~e & g);
    const u32 sum1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
    const u32 sum0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
    const u32 majority = (a & b) ^ (a & c) ^ (b & c);
    const u32 both = early + choose + sum1;
    const u32 next_e = both * one + d;
    const u32 next_a = (majority * one + sum0) * one + both;
    i = g;
    g = f;
    f = e;
    e = next_e;
    d = c;
    c = b;
    b = a;
    a = next_a;
  }
  h[0] += a;
  h[1] += b;
  h[2] += c;
  h[3] += d;
  h[4] += e;
  h[5] += f;
  h[6] += g;
  h[7] += i;
}

// Blocks on their way from memory to a thread's own place in shared memory.  In registers they would not be on
// their way: the compiler puts a load right before its use, and each block would wait for memory.
constexpr int kStages = 4;

struct Stage {
  uint4 quarters[4];
  uint4 gap;  // so that neighbours' stages begin in other banks
};

__device__ __forceinline__ void fetch(Stage& stage, const u8* from) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) copy_async(&stage.quarters[quarter], (const uint4*)from + quarter);
  end_copies();
}

struct Range {
  const u8* data;
  u64 nbytes;
  u64 first_leaf;  // of all leaves of the launch; ascending, the first is 0
};

// Leaf i of a range holds its bytes from i * leaf_bytes to the next leaf or the end.  Of every leaf the blocks
// of 64 bytes (with padding) from `first_block` up to `end_block` are hashed; slices go in order, from 0.  `one`
// is 1.
extern "C" __global__ void __launch_bounds__(32) sha256_leaves(const Range* __restrict__ ranges, u32 range_count,
                                                               u64 leaf_bytes, u64 leaves, u64 first_block,
                                                               u64 end_block, u32* __restrict__ digests,
                                                               u32 one) {
  const u64 leaf = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (leaf >= leaves) return;
  u32 low = 0;
  for (u32 high = range_count; high - low > 1;) {
    const u32 middle = low + (high - low) / 2;
    if (ranges[middle].first_leaf <= leaf) low = middle;
    else high = middle;
  }
  const Range range = ranges[low];
  const u64 first = (leaf - range.first_leaf) * leaf_bytes;
  const u64 size = leaf_bytes < range.nbytes - first ? leaf_bytes : range.nbytes - first;
  const u8* const from = range.data + first;
  const bool is_aligned = ((u64)from & 15) == 0;
  const u64 whole = size / 64;
  const u64 blocks = (size + 9 + 63) / 64;  // with the padding: one bit, and the length in 64 bits

  if (first_block >= blocks) return;  // a short leaf, done before
  const u64 end = end_block < blocks ? end_block : blocks;

  u32 h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  if (first_block > 0) {
#pragma unroll
    for (int word = 0; word < 8; ++word) h[word] = digests[leaf * 8 + word];
  }
  u64 block = first_block;
  const u64 whole_end = end < whole ? end : whole;
  if (is_aligned && block < whole_end) {
    // Whole blocks, the next ones on their way while one is hashed; behind the end, the last one again.
    __shared__ Stage stages[kStages][32];
    const u64 last = whole_end - 1;
    for (u64 next = block; next < block + kStages - 1; ++next) {
      fetch(stages[next % kStages][threadIdx.x], from + (next < last ? next : last) * 64);
    }
#pragma unroll 1
    for (; block < whole_end; ++block) {
      const u64 next = block + kStages - 1;
      fetch(stages[next % kStages][threadIdx.x], from + (next < last ? next : last) * 64);
      wait_for_all_but<kStages - 1>();
      const Stage& stage = stages[block % kStages][threadIdx.x];
      u32 w[16];
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const uint4 words = stage.quarters[quarter];
        w[4 * quarter] = big_endian(words.x);
        w[4 * quarter + 1] = big_endian(words.y);
        w[4 * quarter + 2] = big_endian(words.z);
        w[4 * quarter + 3] = big_endian(words.w);
      }
      compress(h, w, one);
    }
  }
  // The end of a leaf, and leaves that start anywhere.
#pragma unroll 1
  for (; block < end; ++block) {
    const u8* const at = from + block * 64;
    const u64 left = block * 64 < size ? size - block * 64 : 0;  // data bytes in this block
    const bool has_mark = block * 64 <= size;                    // the bit after the last byte
    u32 w[16];
#pragma unroll
    for (int word = 0; word < 16; ++word) {
      u32 value = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const u64 position = 4 * word + byte;
        u32 next = 0;
        if (position < left) next = at[position];
        else if (position == left && has_mark) next = 0x80;
        value = value << 8 | next;
      }
      w[word] = value;
    }
    if (block == blocks - 1) {
      w[14] = (u32)(size >> 29);
      w[15] = (u32)(size << 3);
    }
    compress(h, w, one);
  }
#pragma unroll
  for (int word = 0; word < 8; ++word) digests[leaf * 8 + word] = end == blocks ? big_endian(h[word]) : h[word];
}
