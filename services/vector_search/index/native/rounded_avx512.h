// Arithmetic on rows rounded to 8 bits, for processors with AVX512-VNNI; rounded_avx2.h has the same for others.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

inline __mmask16 within(int64_t dimension, int64_t d) {
  return dimension - d >= 16 ? 0xffff : __mmask16((1u << (dimension - d)) - 1);
}

// Rounds a query to its code; returns its scale, and the sum of its code.
inline float round_query(const float* q, int64_t dimension, int8_t* code, int32_t& total) {
  __m512 most = _mm512_setzero_ps();
  for (int64_t d = 0; d < dimension; d += 16)
    most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(within(dimension, d), q + d)));
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 by = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < dimension; d += 16) {
    const __mmask16 in = within(dimension, d);
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(in, q + d), by));
    sum = _mm512_add_epi32(sum, x);
    _mm_mask_storeu_epi8(code + d, in, _mm512_cvtsepi32_epi8(x));
  }
  total = _mm512_reduce_add_epi32(sum);
  return largest / 127.0f;
}

// Makes a query's code of a row's, which is that plus 128; returns the sum of the code.
inline int32_t query_of_row(const uint8_t* x, int64_t width, int8_t* code) {
  const __m512i middle = _mm512_set1_epi8(-128), ones = _mm512_set1_epi8(1);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < width; d += 64) {
    const __m512i u = _mm512_loadu_si512(x + d);
    sum = _mm512_dpbusd_epi32(sum, u, ones);
    _mm512_storeu_si512(code + d, _mm512_xor_si512(u, middle));
  }
  return _mm512_reduce_add_epi32(sum) - 128 * int32_t(width);
}

inline int32_t dot(const uint8_t* x, const int8_t* code, int64_t width) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < width; d += 64)
    sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(x + d), _mm512_loadu_si512(code + d));
  return _mm512_reduce_add_epi32(sum);
}

inline __m512i halved(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// Four at once share the sums across lanes, which cost more than the products of a short row.
inline void dot4(const uint8_t* const* x, const int8_t* code, int64_t width, int32_t* dots) {
  __m512i sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = _mm512_setzero_si512();
  for (int64_t d = 0; d < width; d += 64) {
    const __m512i q = _mm512_loadu_si512(code + d);
    for (int i = 0; i < 4; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], _mm512_loadu_si512(x[i] + d), q);
  }
  const __m512i a = halved(sum[0], sum[1]), b = halved(sum[2], sum[3]);
  const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dots),
                   _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1)));
}

// The product of two rows, or the square of their distance.
inline float exact_sum(const float* x, const float* q, int64_t dimension, bool l2) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < dimension; d += 16) {
    const __mmask16 in = within(dimension, d);
    const __m512 a = _mm512_maskz_loadu_ps(in, x + d), b = _mm512_maskz_loadu_ps(in, q + d);
    const __m512 gap = _mm512_sub_ps(a, b);
    sum = l2 ? _mm512_fmadd_ps(gap, gap, sum) : _mm512_fmadd_ps(a, b, sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// Rounds a row to its code; returns its scale, and its square.
inline float round_row(const float* x, int64_t dimension, uint8_t* code, float& square) {
  __m512 most = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  for (int64_t d = 0; d < dimension; d += 16) {
    const __m512 part = _mm512_maskz_loadu_ps(within(dimension, d), x + d);
    most = _mm512_max_ps(most, _mm512_abs_ps(part));
    squares = _mm512_fmadd_ps(part, part, squares);
  }
  const float largest = _mm512_reduce_max_ps(most), scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  const __m512 by = _mm512_set1_ps(scale);
  for (int64_t d = 0; d < dimension; d += 16) {
    const __mmask16 in = within(dimension, d);
    const __m512 part = _mm512_div_ps(_mm512_maskz_loadu_ps(in, x + d), by);
    // Clipped, because the scale of a row of denormal numbers is itself rounded.
    __m512i rounded = _mm512_cvtps_epi32(part);
    rounded = _mm512_max_epi32(_mm512_min_epi32(rounded, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
    _mm_mask_storeu_epi8(code + d, in, _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, _mm512_set1_epi32(128))));
  }
  square = _mm512_reduce_add_ps(squares);
  return scale;
}

}  // namespace
