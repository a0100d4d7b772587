// Arithmetic on rows rounded to 8 bits, for processors with AVX2; rounded_avx512.h has the same for newer ones.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

// Rounds a query to its code; returns its scale, and the sum of its code.
inline float round_query(const float* q, int64_t dimension, int8_t* code, int32_t& total) {
  float largest = 0.0f;
  for (int64_t d = 0; d < dimension; ++d) largest = std::max(largest, std::fabs(q[d]));
  const float by = largest > 0.0f ? 127.0f / largest : 0.0f;
  total = 0;
  for (int64_t d = 0; d < dimension; ++d) {
    const int32_t x = _mm_cvtss_si32(_mm_set_ss(q[d] * by));
    total += x;
    code[d] = int8_t(std::min(std::max(x, -128), 127));
  }
  return largest / 127.0f;
}

// Makes a query's code of a row's, which is that plus 128; returns the sum of the code.
inline int32_t query_of_row(const uint8_t* x, int64_t width, int8_t* code) {
  int32_t total = 0;
  for (int64_t d = 0; d < width; ++d) {
    const int32_t each = int32_t(x[d]) - 128;
    total += each;
    code[d] = int8_t(each);
  }
  return total;
}

inline __m256i wide_row(const uint8_t* x) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

inline __m256i wide_query(const int8_t* code) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code)));
}

// Products of 16 bits: two of 8 bits as `maddubs` adds them would not fit.
inline int32_t dot(const uint8_t* x, const int8_t* code, int64_t width) {
  __m256i sum = _mm256_setzero_si256();
  for (int64_t d = 0; d < width; d += 16)
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(wide_row(x + d), wide_query(code + d)));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  four = _mm_hadd_epi32(four, four);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(four, four));
}

// Four at once share the query's code, and the sums across lanes.
inline void dot4(const uint8_t* const* x, const int8_t* code, int64_t width, int32_t* dots) {
  __m256i sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = _mm256_setzero_si256();
  for (int64_t d = 0; d < width; d += 16) {
    const __m256i q = wide_query(code + d);
    for (int i = 0; i < 4; ++i) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(wide_row(x[i] + d), q));
  }
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dots),
                   _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

inline __m256 added(__m256 a, __m256 b, __m256 sum, bool l2) {
  const __m256 gap = _mm256_sub_ps(a, b);
  return l2 ? _mm256_fmadd_ps(gap, gap, sum) : _mm256_fmadd_ps(a, b, sum);
}

// The product of two rows, or the square of their distance.
inline float exact_sum(const float* x, const float* q, int64_t dimension, bool l2) {
  __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  int64_t d = 0;
  for (; d + 16 <= dimension; d += 16) {
    even = added(_mm256_loadu_ps(x + d), _mm256_loadu_ps(q + d), even, l2);
    odd = added(_mm256_loadu_ps(x + d + 8), _mm256_loadu_ps(q + d + 8), odd, l2);
  }
  even = _mm256_add_ps(even, odd);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(even), _mm256_extractf128_ps(even, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  float total = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  for (; d < dimension; ++d) total += l2 ? (x[d] - q[d]) * (x[d] - q[d]) : x[d] * q[d];
  return total;
}

// Rounds a row to its code; returns its scale, and its square.
inline float round_row(const float* x, int64_t dimension, uint8_t* code, float& square) {
  float largest = 0.0f;
  square = 0.0f;
  for (int64_t d = 0; d < dimension; ++d) {
    largest = std::max(largest, std::fabs(x[d]));
    square += x[d] * x[d];
  }
  const float scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  for (int64_t d = 0; d < dimension; ++d) {
    // Clipped, because the scale of a row of denormal numbers is itself rounded.
    const int32_t rounded = _mm_cvtss_si32(_mm_set_ss(x[d] / scale));
    code[d] = uint8_t(std::min(std::max(rounded, -127), 127) + 128);
  }
  return scale;
}

}  // namespace
