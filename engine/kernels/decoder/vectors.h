// Sixteen numbers at a time, in as many registers as the processor needs for them: one source for AVX-512, AVX2 and
// processors with neither. Conversions and products of bf16 pairs and of bytes have instructions of their own, with plain
// forms beside them that give the same bits for bytes and fp32 sums for bf16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// A loop of at most 16 turns whose body stands once for each. Arrays of vectors that it indexes stay in registers: left to
// itself, GCC unrolls after it has laid them into memory, and stores every sum at every turn.
#define UNROLLED(i, end) _Pragma("GCC unroll 16") for (int i = 0; i < (end); ++i)
// A function of a few instructions: in a source as large as this, GCC calls some of them, which takes 40 times as long.
#define INLINED inline __attribute__((always_inline))

namespace spillway {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = 64 / REGISTER;

// In GCC's own notation a vector that is wider than a register lies in memory, so parts are spelled out.
template <class T>
struct Lanes {
  typedef T Part __attribute__((vector_size(REGISTER)));
  Part part[PARTS];

  T operator[](int i) const { return part[i / (16 / PARTS)][i % (16 / PARTS)]; }
  void set(int i, T x) { part[i / (16 / PARTS)][i % (16 / PARTS)] = x; }
  template <class U>
  explicit operator Lanes<U>() const {  // the same bits
    Lanes<U> v;
    UNROLLED(i, PARTS) v.part[i] = (typename Lanes<U>::Part)part[i];
    return v;
  }
};
typedef Lanes<float> F;
typedef Lanes<int32_t> I;
typedef uint16_t H __attribute__((vector_size(32)));  // 16 halves of either kind

template <class To, class From, class Do>
INLINED Lanes<To> each(Lanes<From> x, Do go) {
  Lanes<To> v;
  UNROLLED(i, PARTS) v.part[i] = go(x.part[i]);
  return v;
}
#define OPERATOR(op)                                                 \
  template <class T>                                                 \
  INLINED Lanes<T> operator op(Lanes<T> x, Lanes<T> y) {              \
    UNROLLED(i, PARTS) x.part[i] = x.part[i] op y.part[i];           \
    return x;                                                        \
  }                                                                  \
  template <class T>                                                 \
  INLINED Lanes<T>& operator op##=(Lanes<T>& x, Lanes<T> y) {         \
    return x = x op y;                                               \
  }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|)
#undef OPERATOR
template <class T>
INLINED Lanes<T> operator-(Lanes<T> x) { return each<T>(x, [](auto part) { return -part; }); }
INLINED I operator<<(I x, int bits) { return each<int32_t>(x, [=](auto part) { return part << bits; }); }
INLINED I operator>>(I x, int bits) { return each<int32_t>(x, [=](auto part) { return part >> bits; }); }
#define COMPARISON(op)                                               \
  INLINED I operator op(F x, F y) {                                   \
    I v;                                                             \
    UNROLLED(i, PARTS) v.part[i] = x.part[i] op y.part[i];           \
    return v;                                                        \
  }
COMPARISON(<) COMPARISON(<=) COMPARISON(>)
#undef COMPARISON
INLINED F pick(I where, F yes, F no) {
  UNROLLED(i, PARTS) yes.part[i] = where.part[i] ? yes.part[i] : no.part[i];
  return yes;
}

template <class V, class T>
INLINED V load(const T* from) {
  V v;
  if constexpr (std::is_same_v<V, F> || std::is_same_v<V, I>) {
    UNROLLED(i, PARTS) std::memcpy(&v.part[i], (const char*)from + i * REGISTER, REGISTER);
  } else {
    std::memcpy(&v, from, sizeof v);
  }
  return v;
}
template <class V, class T>
INLINED void store(T* to, V v) {
  if constexpr (std::is_same_v<V, F> || std::is_same_v<V, I>) {
    UNROLLED(i, PARTS) std::memcpy((char*)to + i * REGISTER, &v.part[i], REGISTER);
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}
INLINED F splat(float x) { return each<float>(F{}, [=](auto zeros) { return x - zeros; }); }
INLINED I splat(int32_t x) { return each<int32_t>(I{}, [=](auto zeros) { return x - zeros; }); }
INLINED F max(F a, F b) { return pick(a > b, a, b); }
INLINED F to_float(I v) { return each<float>(v, [](auto part) { return __builtin_convertvector(part, F::Part); }); }

INLINED F::Part fma(F::Part a, F::Part b, F::Part c) {
#if defined(__AVX512F__)
  return (F::Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (F::Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
INLINED F fma(F a, F b, F c) {
  UNROLLED(i, PARTS) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

// 16 numbers of another kind, widened: GCC takes them apart one by one for __builtin_convertvector.
#if defined(__AVX512F__)
INLINED I unsigned_bytes(const uint8_t* from) { return {{(I::Part)_mm512_cvtepu8_epi32(load<__m128i>(from))}}; }
INLINED I signed_bytes(const uint8_t* from) { return {{(I::Part)_mm512_cvtepi8_epi32(load<__m128i>(from))}}; }
INLINED I unsigned_halves(H v) { return {{(I::Part)_mm512_cvtepu16_epi32((__m256i)v)}}; }
#elif defined(__AVX2__)
INLINED I unsigned_bytes(const uint8_t* from) {
  const __m128i v = load<__m128i>(from);
  return {{(I::Part)_mm256_cvtepu8_epi32(v), (I::Part)_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))}};
}
INLINED I signed_bytes(const uint8_t* from) {
  const __m128i v = load<__m128i>(from);
  return {{(I::Part)_mm256_cvtepi8_epi32(v), (I::Part)_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))}};
}
INLINED I unsigned_halves(H v) {
  const __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
  return {{(I::Part)_mm256_cvtepu16_epi32(low), (I::Part)_mm256_cvtepu16_epi32(high)}};
}
#else
INLINED I unsigned_bytes(const uint8_t* from) {
  I v;
  for (int i = 0; i < 16; ++i) v.set(i, from[i]);
  return v;
}
INLINED I signed_bytes(const uint8_t* from) {
  I v;
  for (int i = 0; i < 16; ++i) v.set(i, int8_t(from[i]));
  return v;
}
INLINED I unsigned_halves(H h) {
  I v;
  for (int i = 0; i < 16; ++i) v.set(i, h[i]);
  return v;
}
#endif

// All numbers of a vector, joined in a fixed order: halves, quarters, eighths.
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
template <class Join>
INLINED float joined(F v, Join join) {
  F8 a[2];
  store((float*)a, v);
  a[0] = join(a[0], a[1]);
  F4 b[2];
  std::memcpy(b, a, 32);
  b[0] = join(b[0], b[1]);
  b[1] = (F4)__builtin_shuffle(b[0], (I4){2, 3, 2, 3});
  b[0] = join(b[0], b[1]);
  const float x = b[0][0], y = b[0][1];
  return join(x, y);
}
INLINED float largest(F v) {
  return joined(v, [](auto a, auto b) { return a > b ? a : b; });
}
INLINED float sum(F v) {
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
INLINED F widen(H v) { return (F)(unsigned_halves(v) << 16); }
INLINED F widen16(H v) {
#if defined(__AVX512F__)
  return {{(F::Part)_mm512_cvtph_ps((__m256i)v)}};
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
  return {{(F::Part)_mm256_cvtph_ps(low), (F::Part)_mm256_cvtph_ps(high)}};
#else
  F w;
  for (int i = 0; i < 16; ++i) w.set(i, widen16(uint16_t(v[i])));
  return w;
#endif
}
INLINED H narrow(F v) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)v.part[0]);
#else
  H h;
  for (int i = 0; i < 16; ++i) h[i] = narrow(v[i]);
  return h;
#endif
}

// acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1], for bf16 pairs.
INLINED F dot_pairs(F acc, I a, I b) {
#if defined(__AVX512BF16__)
  return {{(F::Part)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0])}};
#else
  const I high = splat(int32_t(0xffff0000));
  acc = fma((F)(a << 16), (F)(b << 16), acc);
  return fma((F)(a & high), (F)(b & high), acc);
#endif
}
#if defined(__x86_64__)
INLINED I::Part dot_shorts(I::Part a, I::Part b) {
#if defined(__AVX512BW__)
  return (I::Part)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I::Part)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (I::Part)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif
// acc[i] += the four products of unsigned bytes a with signed bytes b.
INLINED I dot_bytes(I acc, I a, I b) {
#if defined(__AVX512VNNI__)
  return {{(I::Part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0])}};
#elif defined(__AVXVNNI__)
  UNROLLED(i, PARTS)
    acc.part[i] = (I::Part)_mm256_dpbusd_avx_epi32((__m256i)acc.part[i], (__m256i)a.part[i], (__m256i)b.part[i]);
  return acc;
#elif defined(__x86_64__)  // two by two as numbers of 16 bits, of which pairs have an instruction
  typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
  const I low = splat(0x00ff00ff), even = a & low, odd = a >> 8 & low;
  UNROLLED(i, PARTS) {
    const Shorts signs = (Shorts)b.part[i];
    acc.part[i] += dot_shorts(even.part[i], (I::Part)(signs << 8 >> 8)) + dot_shorts(odd.part[i], (I::Part)(signs >> 8));
  }
  return acc;
#else
  for (int i = 0; i < 4; ++i) acc += (a >> 8 * i & splat(255)) * (b << (24 - 8 * i) >> 24);
  return acc;
#endif
}

inline F exponential(F x) {  // relative error below 2e-7; 0 from -87 down
  const F least = splat(-87.0f), most = splat(88.0f);
  const I under = x < least;
  x = pick(under, least, x);
  x = pick(x > most, most, x);
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
  return pick(under, F{}, scaled);
}

inline F tanh(F x) {
  const F e = exponential(x + x);
  return splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
}

inline F capped(F x, float cap) { return splat(cap) * tanh(x / splat(cap)); }

INLINED void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
INLINED void prefetch_beyond(const void* at) { __builtin_prefetch(at, 0, 2); }  // not into the first cache

}  // namespace spillway
