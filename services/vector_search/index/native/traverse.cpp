// Search of a frozen HNSW graph: a walk over rows rounded to 8 bits, then exact scores for the best of what it found.
// Built by common/native/library.py for processors with AVX512-VNNI; called by services/vector_search/index/frozen_graph.py.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// As compact.py lays it out. A node's code x is its row divided by `scale`, rounded, plus 128; links are a
// count and then nodes; `upper` holds, from `upper_at` on, a node's links of levels 1 and above.
struct Graph {
  int64_t nodes, dimension, width, links, upper_links, entry, levels;
  const uint32_t* near;
  const uint32_t* upper;
  const int64_t* upper_at;
  const uint8_t* codes;
  const float* weights;  // of each node: scale, and what its score begins with (l2: minus half its square)
  const int64_t* rows;   // the row of each node
  const float* matrix;
  const bool* live;
  int64_t l2;
};

struct Candidate {
  float score;
  uint32_t node;  // times two, plus one once its links were followed
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

struct Scratch {
  Query query;
  std::vector<uint64_t> seen;
  std::vector<Candidate> best;  // best first
  std::vector<uint32_t> fresh;
  std::vector<float> scores;
  std::vector<Candidate> better;
  std::vector<std::pair<float, int64_t>> scored;
};

uint32_t descend(const Graph& g, const Query& query) {
  uint32_t at = uint32_t(g.entry);
  float score = query.score(g, at);
  for (int64_t level = g.levels; level > 0; --level) {
    for (bool moved = true; moved;) {
      moved = false;
      const uint32_t* links = g.upper + g.upper_at[at] + (level - 1) * (g.upper_links + 1);
      const uint32_t count = links[0] & 0xffff;
      for (uint32_t i = 1; i <= count; ++i) prefetch(g, links[i]);
      for (uint32_t i = 1; i <= count; ++i) {
        const float other = query.score(g, links[i]);
        if (other > score) score = other, at = links[i], moved = true;
      }
    }
  }
  return at;
}

// Puts `count` new candidates in their places among the `size` best; returns the first place that changed.
size_t merge(Candidate* best, size_t size, Candidate* fresh, size_t count) {
  std::sort(fresh, fresh + count, [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  size_t end = size;
  for (size_t i = count; i-- > 0;) {
    const float score = fresh[i].score;
    size_t place = 0;
    for (size_t left = end; left > 0;) {  // without branches: which way it goes cannot be foreseen
      const size_t half = (left + 1) / 2;
      const bool beyond = best[place + half - 1].score >= score;
      place += beyond ? half : 0;
      left = beyond ? left - half : half - 1;
    }
    std::memmove(best + place + i + 1, best + place, (end - place) * sizeof(Candidate));
    best[place + i] = fresh[i];
    end = place;
  }
  return end;
}

void walk(const Graph& g, size_t ef, Scratch& s) {
  s.seen.assign(size_t(g.nodes + 63) / 64, 0);
  s.best.resize(ef + size_t(g.links));
  s.fresh.resize(size_t(g.links) + 4);
  s.scores.resize(size_t(g.links) + 4);
  s.better.resize(size_t(g.links));
  const uint32_t begin = descend(g, s.query);
  s.seen[begin >> 6] |= 1ull << (begin & 63);
  Candidate* best = s.best.data();
  best[0] = {s.query.score(g, begin), begin << 1};
  size_t size = 1, next = 0;
  while (next < size) {
    best[next].node |= 1;
    const uint32_t* links = g.near + int64_t(best[next].node >> 1) * (g.links + 1);
    const uint32_t count = links[0] & 0xffff;
    size_t fresh = 0;
    for (uint32_t i = 1; i <= count; ++i) {
      const uint32_t node = links[i];
      const uint64_t bit = 1ull << (node & 63);
      s.fresh[fresh] = node;
      fresh += (s.seen[node >> 6] & bit) == 0;
      s.seen[node >> 6] |= bit;
    }
    for (size_t i = 0; i < fresh; ++i) prefetch(g, s.fresh[i]);
    for (size_t i = fresh; i % 4 != 0; ++i) s.fresh[i] = s.fresh[0];
    for (size_t i = 0; i < fresh; i += 4) s.query.score4(g, s.fresh.data() + i, s.scores.data() + i);
    const float least = size == ef ? best[size - 1].score : -INFINITY;
    size_t better = 0;
    for (size_t i = 0; i < fresh; ++i) {
      s.better[better] = {s.scores[i], s.fresh[i] << 1};
      better += s.scores[i] > least;
    }
    size_t first = next + 1;
    if (better > 0) {
      first = std::min(first, merge(best, size, s.better.data(), better));
      size = std::min(ef, size + better);
    }
    for (next = first; next < size && (best[next].node & 1); ++next) {
    }
    if (next < size) {
      const uint32_t* coming = g.near + int64_t(best[next].node >> 1) * (g.links + 1);
      for (int64_t i = 0; i <= g.links; i += 16) _mm_prefetch(coming + i, _MM_HINT_T0);
    }
  }
  s.best.resize(size);
}

// Writes at most k rows and scores, best first; returns how many.
int64_t search(const Graph& g, const float* q, int64_t k, int64_t ef, int64_t spare, int64_t* rows,
               float* scores, Scratch& s) {
  s.query.set(g, q);
  walk(g, size_t(std::max(ef, k)), s);
  s.scored.clear();
  for (const Candidate& candidate : s.best) {
    const int64_t row = g.rows[candidate.node >> 1];
    if (!g.live[row]) continue;
    for (int64_t d = 0; d < g.dimension; d += 16)
      _mm_prefetch(g.matrix + row * g.dimension + d, _MM_HINT_T0);
    s.scored.emplace_back(0.0f, row);
    if (int64_t(s.scored.size()) == k + spare) break;
  }
  for (auto& [score, row] : s.scored) score = exact(g, q, row);
  const int64_t found = std::min<int64_t>(k, int64_t(s.scored.size()));
  std::partial_sort(s.scored.begin(), s.scored.begin() + found, s.scored.end(),
                    [](const auto& a, const auto& b) { return a.first > b.first; });
  for (int64_t i = 0; i < found; ++i) scores[i] = s.scored[i].first, rows[i] = s.scored[i].second;
  return found;
}

}  // namespace

// Searches `count` queries on `threads` threads, this one among them; returns the least number of rows found.
extern "C" int64_t spillway_search(const Graph* graph, const float* queries, int64_t count, int64_t k,
                                   int64_t ef, int64_t spare, int64_t threads, int64_t* rows,
                                   float* scores) {
  constexpr int64_t kTogether = 8;
  std::atomic<int64_t> begun{0}, least{k};
  auto work = [&] {
    thread_local Scratch scratch;
    for (int64_t at; (at = begun.fetch_add(kTogether)) < count;)
      for (int64_t i = at; i < std::min(at + kTogether, count); ++i) {
        const int64_t found = search(*graph, queries + i * graph->dimension, k, ef, spare, rows + i * k,
                                     scores + i * k, scratch);
        for (int64_t seen = least; found < seen && !least.compare_exchange_weak(seen, found);) {
        }
      }
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min(threads, (count + kTogether - 1) / kTogether); ++t)
    others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
  return least;
}
