// Products, tables of scores and sums of codes for processors with AVX2 and FMA.
//
// Of 8-bit codes every score is read by itself. Of 4 bits the codes of 32 rows are transposed, so that one permutation of
// bytes looks one subspace of 32 rows up in its table of 16 scores.
#pragma once

#include <immintrin.h>

#include "lists.h"

namespace {

float sum_of(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

float dot(const float* a, const float* b, int64_t count) {
  __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  int64_t d = 0;
  for (; d + 16 <= count; d += 16) {
    even = _mm256_fmadd_ps(_mm256_loadu_ps(a + d), _mm256_loadu_ps(b + d), even);
    odd = _mm256_fmadd_ps(_mm256_loadu_ps(a + d + 8), _mm256_loadu_ps(b + d + 8), odd);
  }
  float sum = sum_of(_mm256_add_ps(even, odd));
  for (; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

// The products of one vector with `count` others that lie one after another. Four at once: their sums do not wait for
// each other.
void products(const float* rows, int64_t count, int64_t width, const float* q, float* out) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* x = rows + i * width;
    __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) {
      const __m256 part = _mm256_loadu_ps(q + d);
      for (int j = 0; j < 4; ++j) sum[j] = _mm256_fmadd_ps(_mm256_loadu_ps(x + j * width + d), part, sum[j]);
    }
    for (int j = 0; j < 4; ++j) {
      float rest = 0.0f;
      for (int64_t e = d; e < width; ++e) rest += x[j * width + e] * q[e];
      out[i + j] = sum_of(sum[j]) + rest;
    }
  }
  for (; i < count; ++i) out[i] = dot(rows + i * width, q, width);
}

float distance(const float* a, const float* b, int64_t count) {
  __m256 sum = _mm256_setzero_ps();
  int64_t d = 0;
  for (; d + 8 <= count; d += 8) {
    const __m256 gap = _mm256_sub_ps(_mm256_loadu_ps(a + d), _mm256_loadu_ps(b + d));
    sum = _mm256_fmadd_ps(gap, gap, sum);
  }
  float all = sum_of(sum);
  for (; d < count; ++d) all += (a[d] - b[d]) * (a[d] - b[d]);
  return std::sqrt(all);
}

// Puts the rounded products of the query with every word into s.rounded.
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
    for (int64_t w = 0; w < entries; w += 8) {
      __m256 sum = _mm256_setzero_ps();
      for (int64_t d = 0; d < g.part; ++d)
        sum = _mm256_fmadd_ps(_mm256_set1_ps(q[d]), _mm256_loadu_ps(words + d * entries + w), sum);
      _mm256_storeu_ps(table + w, sum);
    }
    const auto [low, high] = std::minmax_element(table, table + entries);
    lows[size_t(j)] = *low;
    widest = std::max(widest, *high - *low);
    least += *low;
  }
  const float scale = widest > 0.0f ? widest / 255.0f : 1.0f, by = 1.0f / scale;
  for (int64_t j = 0; j < m; ++j) {
    const __m256 low = _mm256_set1_ps(lows[size_t(j)]), times = _mm256_set1_ps(by);
    for (int64_t w = 0; w < entries; w += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(s.table.data() + j * entries + w), low), times);
      const __m256i whole = _mm256_cvtps_epi32(x);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(s.rounded.data() + j * entries + w), _mm_packus_epi16(words, words));
    }
  }
  return {scale, least};
}

// Sums up the tables for a block of 8-bit codes.
void sum_up_bytes(const Lists& g, const uint8_t* table, const uint8_t* codes, int32_t* sums) {
  constexpr int64_t kEntries = 256, kTogether = 4;
  for (int64_t i = 0; i < kBlock; i += kTogether) {
    int32_t sum[kTogether] = {0, 0, 0, 0};
    for (int64_t j = 0; j < g.subspaces; ++j)
      for (int64_t r = 0; r < kTogether; ++r) sum[r] += table[j * kEntries + codes[j * kBlock + i + r]];
    for (int64_t r = 0; r < kTogether; ++r) sums[(i + r) / 2 + ((i + r) % 2) * (kBlock / 2)] = sum[r];
  }
}

// Adds to the sums of 32 rows what the tables of some eights of subspaces hold for their 4-bit codes.
void sum_up_some(const uint8_t* table, const uint8_t* codes, int64_t eights, int32_t* sums) {
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i apart = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                         0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  // Of 16 bits, two rows each: the second row's sum, and that of the first plus 256 times that of the second.
  __m256i second = _mm256_setzero_si256(), both = _mm256_setzero_si256();
  for (int64_t e = 0; e < eights; ++e, codes += 4 * kBlock, table += 8 * kNibbles) {
    __m256i by_row[4], code[4];
    for (int i = 0; i < 4; ++i)
      by_row[i] = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i)), apart);
    const __m256i a = _mm256_unpacklo_epi32(by_row[0], by_row[1]), b = _mm256_unpacklo_epi32(by_row[2], by_row[3]);
    const __m256i c = _mm256_unpackhi_epi32(by_row[0], by_row[1]), d = _mm256_unpackhi_epi32(by_row[2], by_row[3]);
    code[0] = _mm256_unpacklo_epi64(a, b), code[1] = _mm256_unpackhi_epi64(a, b);
    code[2] = _mm256_unpacklo_epi64(c, d), code[3] = _mm256_unpackhi_epi64(c, d);
    for (int64_t s = 0; s < 8; ++s) {
      const __m256i scores =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + s * kNibbles)));
      const __m256i half = s < 4 ? code[s] : _mm256_srli_epi16(code[s - 4], 4);
      const __m256i found = _mm256_shuffle_epi8(scores, _mm256_and_si256(half, nibble));
      both = _mm256_add_epi16(both, found);
      second = _mm256_add_epi16(second, _mm256_srli_epi16(found, 8));
    }
  }
  const __m256i first = _mm256_sub_epi16(both, _mm256_slli_epi16(second, 8));
  alignas(32) uint16_t lanes[2][2][8];  // of each half of the rows' fours: rows 0 to 7 of 16, then the others
  const __m256i low = _mm256_unpacklo_epi16(first, second), high = _mm256_unpackhi_epi16(first, second);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), high);
  for (int i = 0; i < 4; ++i)  // rows 8 i ... of the register that was loaded i-th
    for (int lane = 0; lane < 2; ++lane)
      for (int r = 0; r < 4; ++r) sums[8 * i + 4 * lane + r] += lanes[i / 2][lane][4 * (i % 2) + r];
}

// Sums up the tables for a block of 4-bit codes.
void sum_up_nibbles(const Lists& g, const uint8_t* table, const uint8_t* codes, int32_t* sums) {
  constexpr int64_t kMost = 32;  // eights whose sums fit 16 bits
  const int64_t eights = g.subspaces / 8;
  std::fill(sums, sums + kBlock, 0);
  for (int64_t e = 0; e < eights; e += kMost) {
    const int64_t some = std::min(kMost, eights - e);
    for (int64_t i = 0; i < kBlock; i += 32)
      sum_up_some(table + e * 8 * kNibbles, codes + (e * kBlock + i) * 4, some, sums + i);
  }
}

// Offers the rows of a block that may be among the best.
void select(const Lists& g, const Asked& asked, int64_t block, const int32_t* sums, float scale, float bias,
            BestKept& best) {
  const __m256 times = _mm256_set1_ps(scale), plus = _mm256_set1_ps(bias);
  const int32_t* rows = g.rows + block * kBlock;
  for (int64_t part = 0; part < kBlock; part += 8) {
    const __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + part));
    __m256 scores = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), times, plus);
    if (g.norms) scores = _mm256_sub_ps(scores, _mm256_loadu_ps(g.norms + block * kBlock + part));
    uint32_t above = uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(scores, _mm256_set1_ps(best.least), _CMP_GT_OQ)));
    if (above == 0) continue;
    alignas(32) float score[8];
    _mm256_store_ps(score, scores);
    for (; above; above &= above - 1) {
      const int at = __builtin_ctz(above);
      const int32_t row = rows[part + at];
      if (row >= 0 && asked.keep[row]) best.offer(score[at], row);
    }
  }
}

template <int kCount>
void score(const Lists& g, const Asked& asked, int64_t block, const Rounding& rounding, float bias, Scratch& s) {
  const uint8_t* table = s.rounded.data();
  alignas(32) int32_t sums[kBlock];
  for (int b = 0; b < kCount; ++b) {
    if (g.entries == kNibbles) {
      sum_up_nibbles(g, table, g.codes + (block + b) * (g.subspaces / 2 * kBlock), sums);
    } else {
      sum_up_bytes(g, table, g.codes + (block + b) * (g.subspaces * kBlock), sums);
    }
    select(g, asked, block + b, sums, rounding.scale, bias, s.best);
  }
}

}  // namespace
