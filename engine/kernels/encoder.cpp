// Kernels of the packed bf16 encoder for CPUs with AVX512-BF16: attention over texts of any lengths, the residual add
// with layer norm, and pooling. Rows are texts laid one after another; nothing is padded.
// Built by common/native/library.py; threads are the OpenMP pool torch already has, as many as torch has in the caller's.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kRows = 8;  // query rows computed together

inline __m512 exp_ps(__m512 x) {
  // 2^n * p(r) with |r| <= ln2/2; relative error < 2e-7, far below bf16's.
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.442695041f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512bh pair(const uint16_t* at) {
  int32_t both;
  std::memcpy(&both, at, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

struct Scratch {
  std::vector<uint16_t> keys, values, weights;
  std::vector<float> scores;
};

// keys: [block of 16 keys][pair of dims][key] ; values: [pair of keys][dim], both as pairs of bf16.
template <int D>
void pack(const uint16_t* qkv, int64_t stride, int64_t hidden, int length, Scratch& s) {
  const int blocks = (length + 15) / 16;
  s.keys.assign(size_t(blocks) * 16 * D, 0);
  s.values.assign(size_t(blocks) * 16 * D, 0);
  for (int t = 0; t < length; ++t) {
    const uint16_t* key = qkv + t * stride + hidden;
    const uint16_t* value = key + hidden;
    uint16_t* to = s.keys.data() + size_t(t / 16) * 16 * D + (t % 16) * 2;
    for (int d = 0; d < D; d += 2) std::memcpy(to + d * 16, key + d, 4);
    uint16_t* vt = s.values.data() + size_t(t / 2) * 2 * D + (t % 2);
    for (int d = 0; d < D; ++d) vt[2 * d] = value[d];
  }
}

template <int D>
void scores(const uint16_t* const* query, int blocks, Scratch& s) {
  const size_t width = size_t(blocks) * 16;
  int b = 0;
  for (; b + 1 < blocks; b += 2) {  // two blocks at once: every broadcast of a query is used twice
    const uint16_t* keys = s.keys.data() + size_t(b) * 16 * D;
    __m512 one[kRows], two[kRows];
    for (int r = 0; r < kRows; ++r) one[r] = two[r] = _mm512_setzero_ps();
    for (int d = 0; d < D; d += 2) {
      const __m512bh k1 = (__m512bh)_mm512_loadu_si512(keys + d * 16);
      const __m512bh k2 = (__m512bh)_mm512_loadu_si512(keys + D * 16 + d * 16);
      for (int r = 0; r < kRows; ++r) {
        const __m512bh q = pair(query[r] + d);
        one[r] = _mm512_dpbf16_ps(one[r], q, k1);
        two[r] = _mm512_dpbf16_ps(two[r], q, k2);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(s.scores.data() + r * width + b * 16, one[r]);
      _mm512_storeu_ps(s.scores.data() + r * width + b * 16 + 16, two[r]);
    }
  }
  if (b < blocks) {
    const uint16_t* keys = s.keys.data() + size_t(b) * 16 * D;
    __m512 sum[kRows];
    for (auto& x : sum) x = _mm512_setzero_ps();
    for (int d = 0; d < D; d += 2) {
      const __m512bh k = (__m512bh)_mm512_loadu_si512(keys + d * 16);
      for (int r = 0; r < kRows; ++r) sum[r] = _mm512_dpbf16_ps(sum[r], pair(query[r] + d), k);
    }
    for (int r = 0; r < kRows; ++r)
      _mm512_storeu_ps(s.scores.data() + r * width + b * 16, sum[r]);
  }
}

// Turns one row of scores into bf16 weights e^(s - max); returns 1 / their sum.
inline float softmax(float* row, uint16_t* weights, int blocks, int length, float scale) {
  const int tail = length - (blocks - 1) * 16;
  const __mmask16 last = __mmask16((1u << tail) - 1);
  const __m512 low = _mm512_set1_ps(-1e30f);
  _mm512_storeu_ps(row + (blocks - 1) * 16,
                   _mm512_mask_blend_ps(last, low, _mm512_loadu_ps(row + (blocks - 1) * 16)));
  __m512 most = low;
  for (int b = 0; b < blocks; ++b) most = _mm512_max_ps(most, _mm512_loadu_ps(row + b * 16));
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most) * scale);
  __m512 sum = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    __m512 e = exp_ps(_mm512_fmsub_ps(_mm512_loadu_ps(row + b * 16), _mm512_set1_ps(scale), top));
    if (b == blocks - 1) e = _mm512_maskz_mov_ps(last, e);
    sum = _mm512_add_ps(sum, e);
    _mm256_storeu_si256((__m256i*)(weights + b * 16), (__m256i)_mm512_cvtneps_pbh(e));
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

template <int D>
void weigh(const Scratch& s, int blocks, const float* inverse, uint16_t* const* out, int rows) {
  constexpr int kWide = 2, kTogether = 8;  // accumulators: kTogether x kWide
  for (int d = 0; d < D; d += 16 * kWide) {
    __m512 sum[kTogether][kWide];
    for (auto& row : sum)
      for (auto& x : row) x = _mm512_setzero_ps();
    for (int t = 0; t < blocks * 16; t += 2) {
      const uint16_t* values = s.values.data() + size_t(t) * D + 2 * d;
      const __m512bh v0 = (__m512bh)_mm512_loadu_si512(values);
      const __m512bh v1 = (__m512bh)_mm512_loadu_si512(values + 32);
      for (int r = 0; r < kTogether; ++r) {
        const __m512bh w = pair(s.weights.data() + size_t(r) * blocks * 16 + t);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], w, v0);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], w, v1);
      }
    }
    for (int r = 0; r < rows; ++r)
      for (int w = 0; w < kWide; ++w) {
        const __m512 x = _mm512_mul_ps(sum[r][w], _mm512_set1_ps(inverse[r]));
        _mm256_storeu_si256((__m256i*)(out[r] + d + w * 16), (__m256i)_mm512_cvtneps_pbh(x));
      }
  }
}

template <int D>
void one_head(const uint16_t* qkv, uint16_t* out, int64_t stride, int64_t hidden, int length,
              float scale, Scratch& s) {
  const int blocks = (length + 15) / 16;
  pack<D>(qkv, stride, hidden, length, s);
  s.scores.resize(size_t(kRows) * blocks * 16);
  s.weights.assign(size_t(kRows) * blocks * 16, 0);
  for (int t = 0; t < length; t += kRows) {
    const int rows = length - t < kRows ? length - t : kRows;
    const uint16_t* query[kRows];
    uint16_t* to[kRows];
    float inverse[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int row = t + (r < rows ? r : 0);
      query[r] = qkv + row * stride;
      to[r] = out + row * hidden;
    }
    scores<D>(query, blocks, s);
    for (int r = 0; r < rows; ++r)
      inverse[r] = softmax(s.scores.data() + size_t(r) * blocks * 16,
                           s.weights.data() + size_t(r) * blocks * 16, blocks, length, scale);
    weigh<D>(s, blocks, inverse, to, rows);
  }
}

inline __m512 widen(const uint16_t* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

// row (fp32) = norm(row) * weight + bias, also rounded into row16; hidden is a multiple of 16.
inline void normalise(float* row, uint16_t* row16, int64_t hidden, const float* weight,
                      const float* bias, float epsilon, __m512 sum) {
  const float mean = _mm512_reduce_add_ps(sum) / hidden;
  const __m512 m = _mm512_set1_ps(mean);
  __m512 square = _mm512_setzero_ps();
  for (int64_t i = 0; i < hidden; i += 16) {
    const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(row + i), m);
    square = _mm512_fmadd_ps(x, x, square);
  }
  const float variance = _mm512_reduce_add_ps(square) / hidden;
  const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(variance + epsilon));
  for (int64_t i = 0; i < hidden; i += 16) {
    __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + i), m), inverse);
    x = _mm512_fmadd_ps(x, _mm512_loadu_ps(weight + i), _mm512_loadu_ps(bias + i));
    _mm512_storeu_ps(row + i, x);
    _mm256_storeu_si256((__m256i*)(row16 + i), (__m256i)_mm512_cvtneps_pbh(x));
  }
}

enum Pooling : int { kFirst, kMean, kMax };

// out (hidden) = the first of a text's rows, their mean or their largest values; with `unit` at length 1. The orders of
// sums are torch's (segment_reduce, normalize): the same bits.
inline void pool_text(const float* rows, int64_t length, int64_t hidden, int pooling, bool unit,
                      float* out) {
  const __m512 count = _mm512_set1_ps(float(length));
  for (int64_t i = 0; i < hidden; i += 16) {
    __m512 x = _mm512_loadu_ps(rows + i);
    if (pooling == kMean) {
      for (int64_t t = 1; t < length; ++t)
        x = _mm512_add_ps(x, _mm512_loadu_ps(rows + t * hidden + i));
      x = _mm512_div_ps(x, count);
    } else if (pooling == kMax) {
      for (int64_t t = 1; t < length; ++t) {
        const __m512 y = _mm512_loadu_ps(rows + t * hidden + i);
        const __mmask16 no_number = _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q);
        x = _mm512_mask_add_ps(_mm512_max_ps(x, y), no_number, x, y);  // stays no number
      }
    }
    _mm512_storeu_ps(out + i, x);
  }
  if (!unit) return;
  __m256 square = _mm256_setzero_ps();
  for (int64_t i = 0; i < hidden; i += 8) {
    const __m256 x = _mm256_loadu_ps(out + i);
    square = _mm256_add_ps(square, _mm256_mul_ps(x, x));
  }
  float lanes[8], sum = 0;
  _mm256_storeu_ps(lanes, square);
  for (float lane : lanes) sum += lane;
  const __m512 norm = _mm512_set1_ps(std::max(std::sqrt(sum), 1e-12f));
  for (int64_t i = 0; i < hidden; i += 16)
    _mm512_storeu_ps(out + i, _mm512_div_ps(_mm512_loadu_ps(out + i), norm));
}

template <int D>
void all_heads(const uint16_t* qkv, uint16_t* out, const int64_t* starts, int64_t texts, int heads,
               float scale) {
  const int64_t hidden = int64_t(heads) * D, stride = 3 * hidden;
#pragma omp parallel
  {
    Scratch s;
#pragma omp for schedule(dynamic, 2)
    for (int64_t task = 0; task < texts * heads; ++task) {
      const int64_t text = task / heads, head = task % heads, start = starts[text];
      one_head<D>(qkv + start * stride + head * D, out + start * hidden + head * D, stride, hidden,
                  int(starts[text + 1] - start), scale, s);
    }
  }
}

}  // namespace

extern "C" {

// qkv: bf16 (rows, 3 * heads * dim); out: bf16 (rows, heads * dim); starts: texts + 1 row numbers.
// Returns 0, or 1 if this head width has no kernel.
int spillway_attention(const uint16_t* qkv, uint16_t* out, const int64_t* starts, int64_t texts,
                       int heads, int dim, float scale) {
  if (dim == 32) all_heads<32>(qkv, out, starts, texts, heads, scale);
  else if (dim == 64) all_heads<64>(qkv, out, starts, texts, heads, scale);
  else return 1;
  return 0;
}

// rows = norm(rows + delta), in place, and the same rounded into rows16; delta is bf16.
void spillway_add_norm(float* rows, const uint16_t* delta, uint16_t* rows16, int64_t count,
                       int64_t hidden, const float* weight, const float* bias, float epsilon) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * hidden;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < hidden; i += 16) {
      const __m512 x = _mm512_add_ps(_mm512_loadu_ps(row + i), widen(delta + r * hidden + i));
      _mm512_storeu_ps(row + i, x);
      sum = _mm512_add_ps(sum, x);
    }
    normalise(row, rows16 + r * hidden, hidden, weight, bias, epsilon, sum);
  }
}

// rows = norm(words[ids] + places[positions] + kinds[types]), and the same rounded into rows16.
void spillway_embed(const float* words, const float* places, const float* kinds, const int64_t* ids,
                    const int64_t* positions, const int64_t* types, float* rows, uint16_t* rows16,
                    int64_t count, int64_t hidden, const float* weight, const float* bias,
                    float epsilon) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < count; ++r) {
    const float* a = words + ids[r] * hidden;
    const float* b = places + positions[r] * hidden;
    const float* c = kinds + (types ? types[r] : 0) * hidden;
    float* row = rows + r * hidden;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < hidden; i += 16) {
      const __m512 x = _mm512_add_ps(_mm512_add_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i)),
                                     _mm512_loadu_ps(c + i));
      _mm512_storeu_ps(row + i, x);
      sum = _mm512_add_ps(sum, x);
    }
    normalise(row, rows16 + r * hidden, hidden, weight, bias, epsilon, sum);
  }
}

// out (texts, hidden): each text's rows pooled, at length 1 if `unit`; starts: texts + 1 row numbers.
void spillway_pool(const float* rows, const int64_t* starts, int64_t texts, int64_t hidden,
                   int pooling, int unit, float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < texts; ++t)
    pool_text(rows + starts[t] * hidden, starts[t + 1] - starts[t], hidden, pooling, unit,
              out + t * hidden);
}
}
