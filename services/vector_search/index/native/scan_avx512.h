// Products, tables of scores and sums of codes for processors with AVX512-VBMI and VNNI.
//
// Of 8-bit codes a table of 256 scores, rounded to 8 bits, is looked up for 64 rows by two permutations of bytes. Of 4 bits
// four tables of 16 scores fit a register, so one permutation looks four subspaces of 16 rows up, and one instruction adds
// the four to the row's sum.
#pragma once

#include <immintrin.h>

#include "lists.h"

namespace {

float dot(const float* a, const float* b, int64_t count) {
  __m512 sum = _mm512_setzero_ps();
  int64_t d = 0;
  for (; d + 16 <= count; d += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + d), _mm512_loadu_ps(b + d), sum);
  if (d < count) {
    const __mmask16 in = __mmask16((1u << (count - d)) - 1);
    sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(in, a + d), _mm512_maskz_loadu_ps(in, b + d), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// The products of one vector with `count` others that lie one after another. Four at once: their sums do not wait for
// each other, and are added up across lanes together.
void products(const float* rows, int64_t count, int64_t width, const float* q, float* out) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* x = rows + i * width;
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t d = 0; d < width; d += 16) {
      const __mmask16 in = width - d >= 16 ? 0xffff : __mmask16((1u << (width - d)) - 1);
      const __m512 part = _mm512_maskz_loadu_ps(in, q + d);
      for (int j = 0; j < 4; ++j) sum[j] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(in, x + j * width + d), part, sum[j]);
    }
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(sum[0], sum[1]), _mm512_unpackhi_ps(sum[0], sum[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(sum[2], sum[3]), _mm512_unpackhi_ps(sum[2], sum[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  for (; i < count; ++i) out[i] = dot(rows + i * width, q, width);
}

float distance(const float* a, const float* b, int64_t count) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < count; d += 16) {
    const __mmask16 in = count - d >= 16 ? 0xffff : __mmask16((1u << (count - d)) - 1);
    const __m512 gap = _mm512_sub_ps(_mm512_maskz_loadu_ps(in, a + d), _mm512_maskz_loadu_ps(in, b + d));
    sum = _mm512_fmadd_ps(gap, gap, sum);
  }
  return std::sqrt(_mm512_reduce_add_ps(sum));
}

Rounding tables(const Lists& g, Scratch& s) {
  const int64_t m = g.subspaces, entries = g.entries;
  s.table.resize(size_t(m * entries));
  s.rounded.resize(size_t(m * entries));
  std::vector<float> lows(size_t(m), 0.0f);
  float widest = 0.0f, least = 0.0f;
  for (int64_t j = 0; j < m; ++j) {
    const float* q = s.rotated.data() + j * g.part;
    const float* words = g.words + j * g.part * entries;
    float* table = s.table.data() + j * entries;
    __m512 low = _mm512_set1_ps(INFINITY), high = _mm512_set1_ps(-INFINITY);
    for (int64_t w = 0; w < entries; w += 16) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < g.part; ++d)
        sum = _mm512_fmadd_ps(_mm512_set1_ps(q[d]), _mm512_loadu_ps(words + d * entries + w), sum);
      _mm512_storeu_ps(table + w, sum);
      low = _mm512_min_ps(low, sum);
      high = _mm512_max_ps(high, sum);
    }
    lows[size_t(j)] = _mm512_reduce_min_ps(low);
    widest = std::max(widest, _mm512_reduce_max_ps(high) - lows[size_t(j)]);
    least += lows[size_t(j)];
  }
  const float scale = widest > 0.0f ? widest / 255.0f : 1.0f, by = 1.0f / scale;
  for (int64_t j = 0; j < m; ++j) {
    const __m512 low = _mm512_set1_ps(lows[size_t(j)]), times = _mm512_set1_ps(by);
    for (int64_t w = 0; w < entries; w += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(s.table.data() + j * entries + w), low), times);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(s.rounded.data() + j * entries + w),
                       _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x)));
    }
  }
  return {scale, least};
}

// Sums up the tables for `kCount` blocks of 8-bit codes; sums[4 b + i] are those of rows 16 i ... of block b.
template <int kCount>
void sum_up_bytes(const Lists& g, const uint8_t* table, const uint8_t* codes, __m512i* sums) {
  constexpr int64_t kEntries = 256;
  const int64_t block = g.subspaces * kBlock;
  const __m512i low_bytes = _mm512_set1_epi16(0xff);
  __m512i halves[2 * kCount];  // of 16 bits: the first 32 rows of a block, then the others
  for (int b = 0; b < 2 * kCount; ++b) halves[b] = _mm512_setzero_si512();
  for (int64_t j = 0; j < g.subspaces; ++j) {
    const uint8_t* t = table + j * kEntries;
    const __m512i t0 = _mm512_loadu_si512(t), t1 = _mm512_loadu_si512(t + 64);
    const __m512i t2 = _mm512_loadu_si512(t + 128), t3 = _mm512_loadu_si512(t + 192);
    for (int b = 0; b < kCount; ++b) {
      const __m512i code = _mm512_loadu_si512(codes + b * block + j * kBlock);
      const __m512i found = _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), _mm512_permutex2var_epi8(t0, code, t1),
                                                   _mm512_permutex2var_epi8(t2, code, t3));
      halves[2 * b] = _mm512_add_epi16(halves[2 * b], _mm512_and_si512(found, low_bytes));
      halves[2 * b + 1] = _mm512_add_epi16(halves[2 * b + 1], _mm512_srli_epi16(found, 8));
    }
  }
  for (int b = 0; b < 2 * kCount; ++b) {
    sums[2 * b] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves[b]));
    sums[2 * b + 1] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves[b], 1));
  }
}

// The same for codes of 4 bits, whose sums have 32 bits throughout.
template <int kCount>
void sum_up_nibbles(const Lists& g, const uint8_t* table, const uint8_t* codes, __m512i* sums) {
  const int64_t block = g.subspaces / 2 * kBlock;
  const __m512i nibble = _mm512_set1_epi8(0x0f), once = _mm512_set1_epi8(1);
  const __m512i place = _mm512_set1_epi32(0x30201000);  // of byte s the s-th table of four
  for (int b = 0; b < 4 * kCount; ++b) sums[b] = _mm512_setzero_si512();
  for (int64_t j = 0; j < g.subspaces; j += 8) {
    const __m512i low = _mm512_loadu_si512(table + j * kNibbles), high = _mm512_loadu_si512(table + (j + 4) * kNibbles);
    for (int b = 0; b < kCount; ++b) {
      for (int i = 0; i < 4; ++i) {
        const __m512i code = _mm512_loadu_si512(codes + b * block + (j / 2 + i) * kBlock);
        constexpr int kAndOr = 0xea;  // (code & nibble) | place
        const __m512i first = _mm512_ternarylogic_epi32(code, nibble, place, kAndOr);
        const __m512i other = _mm512_ternarylogic_epi32(_mm512_srli_epi16(code, 4), nibble, place, kAndOr);
        __m512i& sum = sums[4 * b + i];
        sum = _mm512_dpbusd_epi32(sum, _mm512_permutexvar_epi8(first, low), once);
        sum = _mm512_dpbusd_epi32(sum, _mm512_permutexvar_epi8(other, high), once);
      }
    }
  }
}

// Offers the rows of a block that may be among the best.
void select(const Lists& g, const Asked& asked, int64_t block, const __m512i* sums, float scale, float bias,
            BestKept& best) {
  const __m512 times = _mm512_set1_ps(scale), plus = _mm512_set1_ps(bias);
  const int32_t* rows = g.rows + block * kBlock;
  for (int64_t part = 0; part < 4; ++part) {
    __m512 scores = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[part]), times, plus);
    if (g.norms) scores = _mm512_sub_ps(scores, _mm512_loadu_ps(g.norms + block * kBlock + part * 16));
    uint32_t above = _mm512_cmp_ps_mask(scores, _mm512_set1_ps(best.least), _CMP_GT_OQ);
    if (above == 0) continue;
    alignas(64) float score[16];
    _mm512_store_ps(score, scores);
    for (; above; above &= above - 1) {
      const int at = __builtin_ctz(above);
      const int32_t row = rows[part * 16 + at];
      if (row >= 0 && asked.keep[row]) best.offer(score[at], row);
    }
  }
}

template <int kCount>
void score(const Lists& g, const Asked& asked, int64_t block, const Rounding& rounding, float bias, Scratch& s) {
  const uint8_t* table = s.rounded.data();
  __m512i sums[4 * kCount];
  if (g.entries == kNibbles) {
    sum_up_nibbles<kCount>(g, table, g.codes + block * (g.subspaces / 2 * kBlock), sums);
  } else {
    sum_up_bytes<kCount>(g, table, g.codes + block * (g.subspaces * kBlock), sums);
  }
  for (int b = 0; b < kCount; ++b) select(g, asked, block + b, sums + 4 * b, rounding.scale, bias, s.best);
}

}  // namespace
