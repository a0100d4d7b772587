// Vectors of 16 numbers in GCC's own notation: one source for AVX-512, AVX2 and processors with neither. Only products of
// bf16 pairs and of bytes have instructions of their own, with plain forms beside them that give the same bits for bytes
// and fp32 sums for bf16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spillway {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint16_t H __attribute__((vector_size(32)));  // 16 halves of either kind
typedef uint8_t B __attribute__((vector_size(16)));
typedef int8_t SB __attribute__((vector_size(16)));

// A loop of at most 16 turns whose body stands once for each. Arrays of vectors that it indexes stay in registers: left to
// itself, GCC unrolls after it has laid them into memory, and stores every sum at every turn.
#define UNROLLED(i, end) _Pragma("GCC unroll 16") for (int i = 0; i < (end); ++i)

template <class V, class T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}
inline F splat(float x) { return x - F{}; }
inline I splat(int32_t x) { return x - I{}; }
inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
  z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
  std::memcpy(&c, z, 64);
  return c;
#else
  return a * b + c;
#endif
}
inline F max(F a, F b) { return a > b ? a : b; }
// GCC takes bytes apart one by one for __builtin_convertvector, some 40 instructions for 16 of them.
#if defined(__AVX512F__)
inline I unsigned_bytes(const uint8_t* from) { return (I)_mm512_cvtepu8_epi32(load<__m128i>(from)); }
inline I signed_bytes(const uint8_t* from) { return (I)_mm512_cvtepi8_epi32(load<__m128i>(from)); }
#elif defined(__AVX2__)
inline I both(__m256i low, __m256i high) {
  I v;
  std::memcpy(&v, &low, 32), std::memcpy((char*)&v + 32, &high, 32);
  return v;
}
inline I unsigned_bytes(const uint8_t* from) {
  const __m128i bytes = load<__m128i>(from);
  return both(_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
}
inline I signed_bytes(const uint8_t* from) {
  const __m128i bytes = load<__m128i>(from);
  return both(_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
}
#else
inline I unsigned_bytes(const uint8_t* from) { return __builtin_convertvector(load<B>(from), I); }
inline I signed_bytes(const uint8_t* from) { return __builtin_convertvector(load<SB>(from), I); }
#endif
inline F to_float(I v) { return __builtin_convertvector(v, F); }

// All numbers of a vector, joined in a fixed order: halves, quarters, eighths.
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
template <class Join>
inline float joined(F v, Join join) {
  F8 a[2];
  std::memcpy(a, &v, 64);
  a[0] = join(a[0], a[1]);
  F4 b[2];
  std::memcpy(b, a, 32);
  b[0] = join(b[0], b[1]);
  b[1] = (F4)__builtin_shuffle(b[0], (I4){2, 3, 2, 3});
  b[0] = join(b[0], b[1]);
  const float x = b[0][0], y = b[0][1];
  return join(x, y);
}
inline float largest(F v) {
  return joined(v, [](auto a, auto b) { return a > b ? a : b; });
}
inline float sum(F v) {
  return joined(v, [](auto a, auto b) { return a + b; });
}

inline float widen(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint16_t narrow(float x) {  // to bf16, to the nearest, even among equals
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widen16(uint16_t half) {  // from fp16
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) {
    const float small = float(fraction) * 5.9604644775390625e-8f;
    return sign ? -small : small;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}
inline uint16_t narrow16(float x) {  // to fp16
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  const _Float16 half = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#endif
}
inline F widen(H v) {
#if defined(__AVX512F__)
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
  return (F)(__builtin_convertvector(v, I) << 16);
#endif
}
inline F widen16(H v) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)v);
#else
  F w;
  for (int i = 0; i < 16; ++i) w[i] = widen16(uint16_t(v[i]));
  return w;
#endif
}
inline H narrow(F v) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)v);
#else
  H h;
  for (int i = 0; i < 16; ++i) h[i] = narrow(float(v[i]));
  return h;
#endif
}

// acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1], for bf16 pairs.
inline F dot_pairs(F acc, I a, I b) {
#if defined(__AVX512BF16__)
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  const I high = splat(int32_t(0xffff0000));
  acc = fma((F)(a << 16), (F)(b << 16), acc);
  return fma((F)(a & high), (F)(b & high), acc);
#endif
}
// acc[i] += the four products of unsigned bytes a with signed bytes b.
inline I dot_bytes(I acc, I a, I b) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
  for (int i = 0; i < 4; ++i) acc += (a >> 8 * i & 255) * (b << (24 - 8 * i) >> 24);
  return acc;
#endif
}

inline F exponential(F x) {  // relative error below 2e-7; 0 from -87 down
  const F least = splat(-87.0f), most = splat(88.0f);
  const I under = x < least;
  x = x < least ? least : x;
  x = x > most ? most : x;
  const F shifted = fma(x, splat(1.44269504f), splat(12582912.0f));
  const F n = shifted - splat(12582912.0f);
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const I power = ((I)shifted << 23) + splat(127 << 23);  // the low bits of `shifted` are n
  const F scaled = p * (F)power;
  return under ? F{} : scaled;
}

inline F tanh(F x) {
  const F e = exponential(x + x);
  return splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
}

inline F capped(F x, float cap) { return splat(cap) * tanh(x / splat(cap)); }

inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }

}  // namespace spillway
