// Remainders modulo the CRC-32 polynomial (bit-reflected, as zlib) of blocks of device memory.
//
// Remainders are linear: from state 0 and not inverted.  They stay the same when zeros are put before
// the data, so block 0 starts `padding` bytes before `data` and all blocks are of equal length.  Each
// thread takes one chunk with four tables in shared memory; then neighbours are put together, level by
// level: remainder(A B) = remainder(A) * x^(8 |B|) + remainder(B).
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define LEVELS 8
#define CHUNK_BYTES 2048
#define POLYNOMIAL 0xEDB88320u

struct Shifts {
  u32 by_level[LEVELS];
};

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  u32 product = 0;
#pragma unroll
  for (int bit = 31; bit >= 0; --bit) {
    product ^= (a >> bit & 1) ? b : 0;
    b = (b >> 1) ^ ((b & 1) ? POLYNOMIAL : 0);
  }
  return product;
}

__device__ __forceinline__ u32 step(const u32 (*table)[256], u32 state, u32 word) {
  state ^= word;
  return table[3][state & 0xFF] ^ table[2][state >> 8 & 0xFF] ^ table[1][state >> 16 & 0xFF] ^
         table[0][state >> 24];
}

extern "C" __global__ void crc32_blocks(const u8* __restrict__ data, u64 padding, Shifts shifts,
                                        u32* __restrict__ remainders) {
  __shared__ u32 table[4][256];
  __shared__ u32 partial[THREADS];
  const u32 thread = threadIdx.x;

  u32 entry = thread;
  for (int bit = 0; bit < 8; ++bit) entry = (entry >> 1) ^ ((entry & 1) ? POLYNOMIAL : 0);
  table[0][thread] = entry;
  __syncthreads();
  for (int slice = 1; slice < 4; ++slice) {
    entry = (entry >> 8) ^ table[0][entry & 0xFF];
    table[slice][thread] = entry;
  }
  __syncthreads();

  // In bytes from the imagined start.
  const u64 first = ((u64)blockIdx.x * THREADS + thread) * CHUNK_BYTES;
  u32 state = 0;
  if (first + CHUNK_BYTES > padding) {
    const u8* from = data + (first > padding ? first - padding : 0);
    const u8* const end = data + (first + CHUNK_BYTES - padding);
    while (from < end && ((u64)from & 15)) state = (state >> 8) ^ table[0][(state ^ *from++) & 0xFF];
    for (; from + 16 <= end; from += 16) {
      const uint4 words = *(const uint4*)from;
      state = step(table, state, words.x);
      state = step(table, state, words.y);
      state = step(table, state, words.z);
      state = step(table, state, words.w);
    }
    while (from < end) state = (state >> 8) ^ table[0][(state ^ *from++) & 0xFF];
  }
  partial[thread] = state;
  __syncthreads();
#pragma unroll 1
  for (int level = 0; level < LEVELS; ++level) {
    const u32 width = 1u << level;
    if ((thread & (2 * width - 1)) == 0) {
      partial[thread] = multiply(partial[thread], shifts.by_level[level]) ^ partial[thread + width];
    }
    __syncthreads();
  }
  if (thread == 0) remainders[blockIdx.x] = partial[0];
}
