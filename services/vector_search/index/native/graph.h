// A graph over rows rounded to 8 bits as native_graph.py lays it out, and how a query scores its nodes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512VNNI__
#include "rounded_avx512.h"
#else
#include "rounded_avx2.h"
#endif

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

struct Query {
  std::vector<int8_t> code;
  float scale = 0.0f;
  int32_t offset = 0;  // what the 128 in every node's code adds

  void set(const Graph& g, const float* q) {
    code.assign(size_t(g.width), 0);
    int32_t total;
    scale = round_query(q, g.dimension, code.data(), total);
    offset = 128 * total;
  }

  void set(const Graph& g, uint32_t node) {
    code.resize(size_t(g.width));
    scale = g.weights[2 * int64_t(node)];
    offset = 128 * query_of_row(g.codes + int64_t(node) * g.width, g.width, code.data());
  }

  float score(const Graph& g, uint32_t node) const {
    return weighed(g, node, dot(g.codes + int64_t(node) * g.width, code.data(), g.width));
  }

  void score4(const Graph& g, const uint32_t* nodes, float* scores) const {
    const uint8_t* x[4];
    for (int i = 0; i < 4; ++i) x[i] = g.codes + int64_t(nodes[i]) * g.width;
    int32_t dots[4];
    dot4(x, code.data(), g.width, dots);
    for (int i = 0; i < 4; ++i) scores[i] = weighed(g, nodes[i], dots[i]);
  }

 private:
  float weighed(const Graph& g, uint32_t node, int32_t dot) const {
    const float* w = g.weights + 2 * int64_t(node);
    return w[1] + w[0] * scale * float(dot - offset);
  }
};

inline void prefetch(const Graph& g, uint32_t node) {
  const uint8_t* x = g.codes + int64_t(node) * g.width;
  for (int64_t d = 0; d < g.width; d += 64) _mm_prefetch(x + d, _MM_HINT_T0);
  _mm_prefetch(g.weights + 2 * int64_t(node), _MM_HINT_T0);
}

float exact(const Graph& g, const float* q, int64_t row) {
  const float total = exact_sum(g.matrix + row * g.dimension, q, g.dimension, g.l2);
  return g.l2 ? -std::sqrt(total) : total;
}

}  // namespace
