// An HNSW graph over rows rounded to 8 bits: built and searched by many threads at once, scored exactly at the end.
// Built by common/native/library.py for processors with AVX512-VNNI; called by services/vector_search/index/native_graph.py.
//
// One thread at a time calls `spillway_insert`, any number `spillway_search` meanwhile. A search may read a list of links
// while it is written: whatever it sees are nodes of the graph, since words are written whole and counts after them.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
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

struct Scratch {
  Query query, other;
  std::vector<uint64_t> seen;
  std::vector<Candidate> best;  // best first
  std::vector<uint32_t> fresh;
  std::vector<float> scores;
  std::vector<Candidate> better;
  std::vector<std::pair<float, int64_t>> scored;
  std::vector<uint32_t> linked;
};

// Goes to the nearest node that single steps lead to, from level `from` down to above `to`.
uint32_t descend(const Graph& g, const Query& query, uint32_t at, int64_t from, int64_t to) {
  float score = query.score(g, at);
  for (int64_t level = from; level > to; --level) {
    for (bool moved = true; moved;) {
      moved = false;
      const uint32_t* links = g.at(at, level);
      const uint32_t count = read(links);
      for (uint32_t i = 1; i <= count; ++i) prefetch(g, read(links + i));
      for (uint32_t i = 1; i <= count; ++i) {
        const uint32_t node = read(links + i);
        const float other = query.score(g, node);
        if (other > score) score = other, at = node, moved = true;
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

// Finds the `ef` best nodes of a level that can be reached from `begin`; s.best holds them, best first. With kDeleted,
// `ef` that are not deleted, and the deleted ones between them, but no more than eight times as many.
template <bool kDeleted>
void walk(const Graph& g, int64_t level, uint32_t begin, size_t ef, Scratch& s) {
  const int64_t most = g.most(level);
  s.seen.resize(std::max(s.seen.size(), size_t(g.slots + 63) / 64));
  std::memset(s.seen.data(), 0, size_t(read(g.state + 2) + 63) / 64 * 8);
  const size_t largest = kDeleted ? 8 * ef : ef;
  s.best.resize(largest + size_t(most));
  s.fresh.resize(size_t(most) + 4);
  s.scores.resize(size_t(most) + 4);
  s.better.resize(size_t(most));
  const auto marked = [&](uint32_t node) {
    return node << 2 | uint32_t(kDeleted && node < g.rows && !g.live[node]) << 1;
  };
  s.seen[begin >> 6] |= 1ull << (begin & 63);
  Candidate* best = s.best.data();
  best[0] = {s.query.score(g, begin), marked(begin)};
  size_t size = 1, next = 0, room = ef + best[0].deleted();
  while (next < size) {
    best[next].mark |= 1;
    const uint32_t* links = g.at(best[next].node(), level);
    const uint32_t count = read(links);
    size_t fresh = 0;
    for (uint32_t i = 1; i <= count; ++i) {
      const uint32_t node = read(links + i);
      const uint64_t bit = 1ull << (node & 63);
      s.fresh[fresh] = node;
      fresh += (s.seen[node >> 6] & bit) == 0;
      s.seen[node >> 6] |= bit;
    }
    for (size_t i = 0; i < fresh; ++i) prefetch(g, s.fresh[i]);
    for (size_t i = fresh; i % 4 != 0; ++i) s.fresh[i] = s.fresh[0];
    for (size_t i = 0; i < fresh; i += 4) s.query.score4(g, s.fresh.data() + i, s.scores.data() + i);
    const float least = size >= room ? best[size - 1].score : -INFINITY;
    size_t better = 0;
    for (size_t i = 0; i < fresh; ++i) {
      s.better[better] = {s.scores[i], marked(s.fresh[i])};
      better += s.scores[i] > least;
    }
    size_t first = next + 1;
    if (better > 0) {
      first = std::min(first, merge(best, size, s.better.data(), better));
      size += better;
      if (kDeleted) {
        for (size_t i = 0; i < better; ++i) room += s.better[i].deleted();
        while (size > std::min(room, largest)) room -= best[--size].deleted();
      } else {
        size = std::min(ef, size);
      }
    }
    for (next = first; next < size && best[next].followed(); ++next) {
    }
    if (next < size) {
      const uint32_t* coming = g.at(best[next].node(), level);
      for (int64_t i = 0; i <= most; i += 16) _mm_prefetch(coming + i, _MM_HINT_T0);
    }
  }
  s.best.resize(size);
}

// Keeps, of candidates for a node's links (best first), those nearer to the node than to any kept before.
void select(const Graph& g, uint32_t node, std::vector<Candidate>& candidates, size_t most, Scratch& s) {
  const float own = g.weights[2 * int64_t(node) + 1];
  size_t kept = 0;
  s.fresh.resize(most + 4);
  float scores[4];
  for (const Candidate& candidate : candidates) {
    if (kept == most) break;
    const uint32_t other = candidate.node();
    s.other.set(g, other);
    const float far = candidate.score - g.weights[2 * int64_t(other) + 1] + own;
    bool good = true;
    for (size_t i = 0; good && i < kept; i += 4) {
      for (size_t j = kept; j < i + 4; ++j) s.fresh[j] = s.fresh[0];
      s.other.score4(g, s.fresh.data() + i, scores);
      good = std::max(std::max(scores[0], scores[1]), std::max(scores[2], scores[3])) <= far;
    }
    if (good) s.fresh[kept++] = other;
  }
  s.fresh.resize(kept);
}

void put(uint32_t* links, const std::vector<uint32_t>& nodes) {
  for (size_t i = 0; i < nodes.size(); ++i) write(links + i + 1, nodes[i]);
  write(links, uint32_t(nodes.size()));
}

constexpr size_t kLocks = 4096;
struct Locks {
  std::atomic_flag flags[kLocks] = {};
  std::mutex entry;
};

// Links `node` from `from`, which forgets others if it has too many then.
void link(const Graph& g, uint32_t from, int64_t level, uint32_t node, Locks& locks, Scratch& s) {
  std::atomic_flag& lock = locks.flags[from % kLocks];
  while (lock.test_and_set(std::memory_order_acquire)) _mm_pause();
  uint32_t* links = g.at(from, level);
  const uint32_t count = links[0];
  if (count < g.most(level)) {
    write(links + count + 1, node);
    write(links, count + 1);
  } else {
    s.query.set(g, from);
    s.best.clear();
    for (uint32_t i = 1; i <= count; ++i) s.best.push_back({s.query.score(g, links[i]), links[i] << 2});
    s.best.push_back({s.query.score(g, node), node << 2});
    std::sort(s.best.begin(), s.best.end(),
              [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    select(g, from, s.best, size_t(g.most(level)), s);
    put(links, s.fresh);
  }
  lock.clear(std::memory_order_release);
}

void insert(const Graph& g, uint32_t node, size_t ef, Locks& locks, Scratch& s) {
  const int64_t height = g.heights[node];
  int64_t levels;
  {
    std::lock_guard<std::mutex> guard(locks.entry);
    levels = g.state[1];
    if (levels < 0) {
      write(g.state, node);
      write(g.state + 1, height);
      return;
    }
  }
  s.query.set(g, node);
  uint32_t begin = descend(g, s.query, uint32_t(g.state[0]), levels, height);
  const int64_t top = std::min(height, levels);
  // Nothing leads here before all levels have links: whoever comes finds the way on.
  for (int64_t level = top; level >= 0; --level) {
    walk<false>(g, level, begin, ef, s);
    begin = s.best[0].node();
    select(g, node, s.best, size_t(g.upper_links), s);
    put(g.at(node, level), s.fresh);
  }
  for (int64_t level = 0; level <= top; ++level) {
    const uint32_t* links = g.at(node, level);
    s.linked.assign(links + 1, links + 1 + links[0]);
    for (const uint32_t other : s.linked) link(g, other, level, node, locks, s);
  }
  if (height > levels) {
    std::lock_guard<std::mutex> guard(locks.entry);
    if (height > g.state[1]) {
      write(g.state, node);
      write(g.state + 1, height);  // after the node that has so many
    }
  }
}

void encode(const Graph& g, const float* x, int64_t row) {
  __m512 most = _mm512_setzero_ps(), square = _mm512_setzero_ps();
  for (int64_t d = 0; d < g.dimension; d += 16) {
    const __m512 part = _mm512_maskz_loadu_ps(within(g, d), x + d);
    most = _mm512_max_ps(most, _mm512_abs_ps(part));
    square = _mm512_fmadd_ps(part, part, square);
  }
  const float largest = _mm512_reduce_max_ps(most), scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  const __m512 by = _mm512_set1_ps(scale);
  uint8_t* code = g.codes + row * g.width;
  std::memset(code, 128, size_t(g.width));
  for (int64_t d = 0; d < g.dimension; d += 16) {
    const __mmask16 in = within(g, d);
    const __m512 part = _mm512_div_ps(_mm512_maskz_loadu_ps(in, x + d), by);
    // Clipped, because the scale of a row of denormal numbers is itself rounded.
    __m512i rounded = _mm512_cvtps_epi32(part);
    rounded = _mm512_max_epi32(_mm512_min_epi32(rounded, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
    _mm_mask_storeu_epi8(code + d, in, _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, _mm512_set1_epi32(128))));
  }
  g.weights[2 * row] = scale;
  g.weights[2 * row + 1] = g.l2 ? -0.5f * _mm512_reduce_add_ps(square) : 0.0f;
}

// Writes at most k rows and scores, best first; returns how many.
int64_t search(const Graph& g, const float* q, int64_t k, int64_t ef, int64_t spare, bool deleted, int64_t* rows,
               float* scores, Scratch& s) {
  s.query.set(g, q);
  const int64_t levels = read(g.state + 1);
  if (levels < 0) return 0;
  const uint32_t begin = descend(g, s.query, uint32_t(read(g.state)), levels, 0);
  const size_t kept = size_t(std::max(ef, k));
  deleted ? walk<true>(g, 0, begin, kept, s) : walk<false>(g, 0, begin, kept, s);
  s.scored.clear();
  for (const Candidate& candidate : s.best) {
    const int64_t row = candidate.node();
    if (row >= g.rows || !g.live[row]) continue;  // newer than the matrix that is read here, or deleted
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

// Calls work(scratch, i) for 0 <= i < count on `threads` threads, this one among them.
template <typename Work>
void share(int64_t count, int64_t threads, int64_t together, const Work& work) {
  std::atomic<int64_t> begun{0};
  auto run = [&] {
    thread_local Scratch scratch;
    for (int64_t at; (at = begun.fetch_add(together)) < count;)
      for (int64_t i = at; i < std::min(at + together, count); ++i) work(scratch, i);
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min(threads, (count + together - 1) / together); ++t) others.emplace_back(run);
  run();
  for (auto& other : others) other.join();
}

// Searches `count` queries; returns the least number of rows found. `deleted` says whether any row may be.
extern "C" int64_t spillway_search(const Graph* graph, const float* queries, int64_t count, int64_t k,
                                   int64_t ef, int64_t spare, int64_t deleted, int64_t threads,
                                   int64_t* rows, float* scores) {
  std::atomic<int64_t> least{k};
  share(count, threads, 8, [&](Scratch& scratch, int64_t i) {
    const int64_t found =
        search(*graph, queries + i * graph->dimension, k, ef, spare, deleted != 0, rows + i * k, scores + i * k,
               scratch);
    for (int64_t seen = least; found < seen && !least.compare_exchange_weak(seen, found);) {
    }
  });
  return least;
}

// Rounds `count` vectors to the codes of their rows.
extern "C" void spillway_encode(const Graph* graph, const float* vectors, const int64_t* rows, int64_t count,
                                int64_t threads) {
  share(count, threads, 64, [&](Scratch&, int64_t i) { encode(*graph, vectors + i * graph->dimension, rows[i]); });
}

// Puts `count` rows of the matrix, whose heights and places for links are set, into the graph.
extern "C" void spillway_insert(const Graph* graph, const int64_t* rows, int64_t count, int64_t ef,
                                int64_t threads) {
  const Graph& g = *graph;
  share(count, threads, 64, [&](Scratch&, int64_t i) { encode(g, g.matrix + rows[i] * g.dimension, rows[i]); });
  Locks locks;
  share(count, threads, 8, [&](Scratch& scratch, int64_t i) { insert(g, uint32_t(rows[i]), size_t(ef), locks, scratch); });
}
