// XXH3's 64-bit hash of many equal pieces of memory, with its default secret and without a seed, by several threads.
// The xxhash package computes the same, piece by piece, and keeps Python's other threads waiting meanwhile.
#include <omp.h>

#include <cstdint>
#include <cstring>

namespace {

typedef uint64_t V __attribute__((vector_size(64), aligned(1)));
typedef uint64_t A __attribute__((vector_size(64)));

constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u,
                   P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;
constexpr int64_t STRIPE = 64, SECRET = 192, STRIPES = (SECRET - STRIPE) / 8, BLOCK = STRIPES * STRIPE;

const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t* at) {
  uint64_t found;
  memcpy(&found, at, sizeof(found));
  return found;
}

inline A accumulate(A sums, const uint8_t* data, const uint8_t* key) {
  const A values = *(const V*)data, keyed = values ^ *(const V*)key;
  const A swapped = __builtin_shuffle(values, A{1, 0, 3, 2, 5, 4, 7, 6});
  return sums + swapped + (keyed & 0xFFFFFFFFu) * (keyed >> 32);
}

inline A scramble(A sums) {
  const A key = *(const V*)(secret + SECRET - STRIPE);
  return ((sums ^ (sums >> 47)) ^ key) * P32_1;
}

uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)a * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

// More than 240 bytes: shorter ones are hashed in other ways.
uint64_t hash(const uint8_t* data, int64_t size) {
  A sums = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  const int64_t blocks = (size - 1) / BLOCK;
  for (int64_t n = 0; n < blocks; ++n) {
    for (int64_t i = 0; i < STRIPES; ++i) sums = accumulate(sums, data + n * BLOCK + i * STRIPE, secret + 8 * i);
    sums = scramble(sums);
  }
  const int64_t left = (size - 1 - blocks * BLOCK) / STRIPE;
  for (int64_t i = 0; i < left; ++i) sums = accumulate(sums, data + blocks * BLOCK + i * STRIPE, secret + 8 * i);
  sums = accumulate(sums, data + size - STRIPE, secret + SECRET - STRIPE - 7);
  uint64_t found = uint64_t(size) * P64_1;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* key = secret + 11 + 16 * i;
    found += folded(sums[2 * i] ^ word(key), sums[2 * i + 1] ^ word(key + 8));
  }
  found ^= found >> 37;
  found *= UINT64_C(0x165667919E3779F9);
  return found ^ (found >> 32);
}

}  // namespace

extern "C" {
// Hash `count` pieces of `size` bytes (more than 240) that begin at `memory` + `offsets`.
void spillway_checksums(
    const void* memory, const int64_t* offsets, int64_t count, int64_t size, uint64_t* found, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) found[i] = hash((const uint8_t*)memory + offsets[i], size);
}
}
