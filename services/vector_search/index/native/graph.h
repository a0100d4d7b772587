// A graph over rows rounded to 8 bits as native_graph.py lays it out, and how a query scores its nodes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// As native_graph.py lays it out; a node is known by its row. A node's code x is its row divided by `scale`, rounded, plus
// 128. Links are a count and then nodes; `upper` holds a node's links of levels 1 and above from slot `upper_at` on.
struct Graph {
  int64_t dimension, width, links, upper_links, slots, rows, l2;
  int64_t* state;  // entry, levels (-1: no node), nodes: above all rows in the graph
  uint32_t* near;
  uint32_t* upper;
  uint32_t* upper_at;
  uint8_t* heights;
  uint8_t* codes;
  float* weights;  // of each node: scale, and what its score begins with (l2: minus half its square)
  const float* matrix;
  const bool* live;
  const int64_t* labels;

  uint32_t* at(uint32_t node, int64_t level) const {
    return level == 0 ? near + int64_t(node) * (links + 1)
                      : upper + (int64_t(upper_at[node]) + level - 1) * (upper_links + 1);
  }
  int64_t most(int64_t level) const { return level == 0 ? links : upper_links; }
};

inline uint32_t read(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void write(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline int64_t read(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void write(int64_t* word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

struct Candidate {
  float score;
  uint32_t mark;  // the node times four, plus two if it was deleted, plus one once its links were followed

  uint32_t node() const { return mark >> 2; }
  bool followed() const { return mark & 1; }
  bool deleted() const { return mark & 2; }
};

inline __mmask16 within(const Graph& g, int64_t d) {
  return g.dimension - d >= 16 ? 0xffff : __mmask16((1u << (g.dimension - d)) - 1);
}

struct Query {
  std::vector<int8_t> code;
  float scale = 0.0f;
  int32_t offset = 0;  // what the 128 in every node's code adds

  void set(const Graph& g, const float* q) {
    code.assign(size_t(g.width), 0);
    __m512 most = _mm512_setzero_ps();
    for (int64_t d = 0; d < g.dimension; d += 16)
      most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_maskz_loadu_ps(within(g, d), q + d)));
    const float largest = _mm512_reduce_max_ps(most);
    scale = largest / 127.0f;
    const __m512 by = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < g.dimension; d += 16) {
      const __mmask16 in = within(g, d);
      const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(in, q + d), by));
      sum = _mm512_add_epi32(sum, x);
      _mm_mask_storeu_epi8(code.data() + d, in, _mm512_cvtsepi32_epi8(x));
    }
    offset = 128 * _mm512_reduce_add_epi32(sum);
  }

  void set(const Graph& g, uint32_t node) {
    code.resize(size_t(g.width));
    scale = g.weights[2 * int64_t(node)];
    const uint8_t* x = g.codes + int64_t(node) * g.width;
    const __m512i middle = _mm512_set1_epi8(-128), ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < g.width; d += 64) {
      const __m512i u = _mm512_loadu_si512(x + d);
      sum = _mm512_dpbusd_epi32(sum, u, ones);
      _mm512_storeu_si512(code.data() + d, _mm512_xor_si512(u, middle));
    }
    offset = 128 * (_mm512_reduce_add_epi32(sum) - 128 * int32_t(g.width));
  }

  float score(const Graph& g, uint32_t node) const {
    const uint8_t* x = g.codes + int64_t(node) * g.width;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < g.width; d += 64)
      sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(x + d), _mm512_loadu_si512(code.data() + d));
    return weighed(g, node, _mm512_reduce_add_epi32(sum));
  }

  // Four at once share the sums across lanes, which cost more than the products of a short row.
  void score4(const Graph& g, const uint32_t* nodes, float* scores) const {
    const uint8_t* x[4];
    __m512i sum[4];
    for (int i = 0; i < 4; ++i) {
      x[i] = g.codes + int64_t(nodes[i]) * g.width;
      sum[i] = _mm512_setzero_si512();
    }
    for (int64_t d = 0; d < g.width; d += 64) {
      const __m512i q = _mm512_loadu_si512(code.data() + d);
      for (int i = 0; i < 4; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], _mm512_loadu_si512(x[i] + d), q);
    }
    const __m512i a = halved(sum[0], sum[1]), b = halved(sum[2], sum[3]);
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    alignas(16) int32_t dots[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(dots),
                    _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1)));
    for (int i = 0; i < 4; ++i) scores[i] = weighed(g, nodes[i], dots[i]);
  }

 private:
  float weighed(const Graph& g, uint32_t node, int32_t dot) const {
    const float* w = g.weights + 2 * int64_t(node);
    return w[1] + w[0] * scale * float(dot - offset);
  }

  static __m512i halved(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
};

inline void prefetch(const Graph& g, uint32_t node) {
  const uint8_t* x = g.codes + int64_t(node) * g.width;
  for (int64_t d = 0; d < g.width; d += 64) _mm_prefetch(x + d, _MM_HINT_T0);
  _mm_prefetch(g.weights + 2 * int64_t(node), _MM_HINT_T0);
}

float exact(const Graph& g, const float* q, int64_t row) {
  const float* x = g.matrix + row * g.dimension;
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < g.dimension; d += 16) {
    const __mmask16 in = within(g, d);
    const __m512 a = _mm512_maskz_loadu_ps(in, x + d), b = _mm512_maskz_loadu_ps(in, q + d);
    const __m512 gap = _mm512_sub_ps(a, b);
    sum = g.l2 ? _mm512_fmadd_ps(gap, gap, sum) : _mm512_fmadd_ps(a, b, sum);
  }
  const float total = _mm512_reduce_add_ps(sum);
  return g.l2 ? -std::sqrt(total) : total;
}

}  // namespace
