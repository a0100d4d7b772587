// `paged_attention` on a CPU: any positions, page tables, windows and grouped heads; fp32, bf16 and fp16 pages.
//
// A sequence's pages are taken in chunks that begin at fixed positions. A chunk has one softmax, and chunks are merged in
// order: what a row gets is one chain of operations, whoever else is in the batch, wherever the pages lie, and however
// the chunks were shared out to threads.
// A sequence's first chunks, its front, may lie in another memory than the rest. Then whoever attends to the front returns
// its chunks merged, and whoever attends to the rest goes on from there: the same chain of operations.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "linear.h"

namespace spillway {

constexpr int PAGE = 32, CHUNK = 8;        // tokens a page, pages a chunk
constexpr int QUERIES = 64;                // query heads that attend to a page together, at most
constexpr int IN_CACHE = 24;               // of a block's: their scores of a chunk stay in the first cache
constexpr int TOGETHER = REGISTER == 64 ? 6 : 4;  // of them whose scores stay in registers
constexpr int SUMS = REGISTER == 64 ? 4 : 2;      // vectors of each of their sums that do
constexpr int WIDEST = 512;                // dims of a head, at most
constexpr float NOTHING = -1e30f;          // the largest score of no token

// The pages of one layer group, (pages, layers, 2, kv heads, PAGE * dim), and every sequence's page table. Keys lie
// [dim][token] and values [token][dim]; in bf16 two neighbours are one unit, since processors multiply pairs: keys
// [dim / 2][token][2], values [token / 2][dim][2]. So products read a page as it lies.
struct Pages {
  uint8_t* data;
  Kind kind;
  int64_t layers, window;                  // window 0: none
  const int32_t* tables;                   // of all sequences, one after another; -1 is a page that is not resident
  const int64_t* starts;                   // sequences + 1
};

// Scores are multiplied by `scale`; with a cap c above 0, x is c * tanh(x / c) then.
struct Heads {
  int64_t heads, kv_heads, dim;
  float scale, cap;
  int64_t shared() const { return heads / kv_heads; }
  int64_t width() const { return up(dim, 32); }
};

// Rows of one sequence that attend to pages together.
struct Block {
  int64_t sequence, first, last, page, pages;  // rows [first, last); logical pages [page, pages)
};

// Softmax over some of the tokens a query head sees: their largest score, and sums of weights and of weighted values.
struct Partial {
  std::vector<float> row_max, row_sum, sums;
  void take(const Partial& from, int64_t first, int64_t queries, int64_t width) {
    row_max.assign(from.row_max.begin() + first, from.row_max.begin() + first + queries);
    row_sum.assign(from.row_sum.begin() + first, from.row_sum.begin() + first + queries);
    sums.assign(from.sums.begin() + first * width, from.sums.begin() + (first + queries) * width);
  }
  void reset(int64_t queries, int64_t width) {
    row_max.assign(queries, NOTHING);
    row_sum.assign(queries, 0.0f);
    sums.assign(queries * width, 0.0f);
  }
};

inline void merge(float& row_max, float& row_sum, float* sums, float other_max, float other_sum, const float* other,
                  int64_t width) {
  const float now = row_max > other_max ? row_max : other_max;
  F both = {};
  both.set(0, row_max - now), both.set(1, other_max - now);
  both = exponential(both);
  const F mine = splat(both[0]), its = splat(both[1]);
  row_sum = fma(splat(row_sum), mine, splat(other_sum * both[1]))[0];
  for (int64_t d = 0; d < width; d += 16)
    store(sums + d, fma(load<F>(sums + d), mine, load<F>(other + d) * its));
  row_max = now;
}

// N numbers of 32 or 16 bits, of which `left` are there; the others are 0.
template <class V, class T>
inline V some(const T* from, int64_t left) {
  constexpr int64_t N = sizeof(V) / sizeof(T);
  if (left >= N) return load<V>(from);
  V v{};
  if (left > 0) std::memcpy(&v, from, left * sizeof(T));
  return v;
}

// What one vector of a page is: 16 numbers, or for bf16 pairs of them.
template <Kind K>
constexpr int64_t UNITS = K == BF16 ? 2 : 1;
template <Kind K>
constexpr int64_t UNIT_BYTES = K == FP16 ? 2 : 4;

// 16 units of a page, of which `left` are there.
template <Kind K>
inline F units(const uint8_t* from, int64_t left) {
  return K == FP16 ? widen16(some<H>((const uint16_t*)from, left)) : some<F>((const float*)from, left);
}

template <Kind K>
inline F dot(F acc, F k, F q) { return K == BF16 ? dot_pairs(acc, (I)k, (I)q) : fma(k, q, acc); }

// Scores of R query heads with the page's 32 tokens: units of even and of odd places have sums of their own, whatever R
// is. As keys are read, so are the lines at `ahead` asked for: all at once, products would only wait for memory.
template <Kind K, int R>
inline void score(const float* const* q, const uint8_t* keys, int64_t across, const uint8_t* ahead, F (*out)[2]) {
  constexpr int64_t VECTOR = 16 * UNIT_BYTES<K>;
  F acc[2][R][2] = {};
  for (int64_t u = 0; u + 1 < across; u += 2)
    UNROLLED(odd, 2) {
      const int64_t at = (u + odd) * 2 * VECTOR;
      F k[2];
      UNROLLED(i, 2) k[i] = units<K>(keys + at + i * VECTOR, 16), ask_for(ahead + at + i * VECTOR);
      UNROLLED(r, R) {
        const F b = splat(q[r][u + odd]);
        UNROLLED(i, 2) acc[odd][r][i] = dot<K>(acc[odd][r][i], k[i], b);
      }
    }
  if (across % 2)
    UNROLLED(i, 2) {
      const F k = units<K>(keys + (across - 1) * 2 * VECTOR + i * VECTOR, 16);
      UNROLLED(r, R) acc[0][r][i] = dot<K>(acc[0][r][i], k, splat(q[r][across - 1]));
    }
  UNROLLED(r, R)
    UNROLLED(i, 2) out[r][i] = acc[0][r][i] + acc[1][r][i];
}

// sums[r] += weights[r] . values, N vectors of dimensions from `d` on; FULL: all of them are there.
template <Kind K, int R, int N, bool FULL>
inline void weigh_some(const F (*p)[2], const uint8_t* values, int64_t d, int64_t dim, const uint8_t* ahead,
                       float* const* sums) {
  F o[R][N];
  UNROLLED(r, R)
    UNROLLED(v, N) o[r][v] = load<F>(sums[r] + d + 16 * v);
  for (int t = 0; t < PAGE / UNITS<K>; ++t) {
    const int64_t at = (t * dim + d) * UNIT_BYTES<K>;
    F x[N];
    UNROLLED(v, N) {
      x[v] = units<K>(values + at + 16 * v * UNIT_BYTES<K>, FULL ? 16 : dim - d - 16 * v);
      ask_for(ahead + at + 16 * v * UNIT_BYTES<K>);
    }
    UNROLLED(r, R) {
      const F b = splat(((const float*)p[r])[t]);
      UNROLLED(v, N) o[r][v] = dot<K>(o[r][v], x[v], b);
    }
  }
  UNROLLED(r, R)
    UNROLLED(v, N) store(sums[r] + d + 16 * v, o[r][v]);
}

template <Kind K, int R>
inline void weigh(const F (*p)[2], const uint8_t* values, int64_t dim, const uint8_t* ahead, float* const* sums) {
  int64_t d = 0;
  if (R == 1)  // twice as many sums, since a product waits for the one before
    for (; d + 32 * SUMS <= dim; d += 32 * SUMS) weigh_some<K, R, 2 * SUMS, true>(p, values, d, dim, ahead, sums);
  for (; d + 16 * SUMS <= dim; d += 16 * SUMS) weigh_some<K, R, SUMS, true>(p, values, d, dim, ahead, sums);
  for (; d + 32 <= dim; d += 32) weigh_some<K, R, 2, true>(p, values, d, dim, ahead, sums);
  for (; d + 16 <= dim; d += 16) weigh_some<K, R, 1, true>(p, values, d, dim, ahead, sums);
  if (d < dim) weigh_some<K, R, 1, false>(p, values, d, dim, ahead, sums);
}

// The pages of a chunk that are resident: where each lies, its first token, and whether every query sees all of it.
struct Chunk {
  const uint8_t* data[CHUNK];
  int64_t base[CHUNK];
  bool whole[CHUNK];
  int64_t pages = 0;
};

// Turn scores `x` of query heads with a chunk's tokens, by (page, query), into weights in the same place; note each
// query's largest score and sum of weights. Lines from `ahead` to `ahead_end` are asked for meanwhile, one a page.
template <Kind K>
inline void weights(const Chunk& chunk, int64_t queries, F (*x)[2], const int64_t* positions, int64_t window,
                    float scale, float cap, const uint8_t* ahead, const uint8_t* ahead_end, float* row_max,
                    float* row_sum) {
  static const float counting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F none = splat(-INFINITY);
  for (int64_t r = 0; r < queries; ++r) {
    F top = splat(NOTHING);
    for (int64_t page = 0; page < chunk.pages; ++page)
      for (int h = 0; h < 2; ++h) {
        F& score = x[page * queries + r][h];
        score *= splat(scale);
        if (cap > 0) score = capped(score, cap);
        if (!chunk.whole[page]) {
          const F at = load<F>(counting) + splat(float(16 * h));
          const F last = splat(float(positions[r] - chunk.base[page]));
          score = pick(at > last, none, score);
          if (window) score = pick(at <= last - splat(float(window)), none, score);
        }
        top = max(score, top);
      }
    row_max[r] = largest(top);
    F total = {};
    for (int64_t page = 0; page < chunk.pages; ++page) {
      F* scores = x[page * queries + r];
      const F e0 = exponential(scores[0] - splat(row_max[r])), e1 = exponential(scores[1] - splat(row_max[r]));
      total += e0 + e1;
      if (K == BF16) {
        store((uint16_t*)scores, narrow(e0));
        store((uint16_t*)scores + 16, narrow(e1));
      } else {
        scores[0] = e0, scores[1] = e1;
      }
      if (ahead < ahead_end) ask_for(ahead), ahead += 64;
    }
    row_sum[r] = sum(total);
  }
}

// Attend with some rows, and the heads on those of K and V from `head` to `head_end`, to the pages [from, to) of their
// sequence, at most a chunk: all scores, then a softmax, then all values. Pages lie apart and a page's heads side by
// side, so keys and values are read page after page, front to back. `q` is (rows, heads, width) fp32, or
// (…, width / 2) bf16 pairs in the same room; results go into `out`, empty before, head by head.
template <Kind K>
inline void attend(const Heads& of, const Pages& pages, int64_t layer, const Block& block, int64_t head,
                   int64_t head_end, int64_t from, int64_t to, const float* q, const int64_t* positions,
                   Partial& out) {
  const int64_t shared = of.shared(), width = of.width(), queries = (block.last - block.first) * shared;
  const int64_t bytes = UNIT_BYTES<K> / UNITS<K> * PAGE * of.dim, half = of.kv_heads * bytes;
  const int64_t count = head_end - head;
  const int32_t* table = pages.tables + pages.starts[block.sequence];
  const float* rows[QUERIES];
  float* sums[QUERIES];
  int64_t where[QUERIES];
  for (int64_t h = head, at = 0; h < head_end; ++h)
    for (int64_t i = 0; i < queries; ++i, ++at) {
      const int64_t row = block.first + i / shared;
      rows[at] = q + (row * of.heads + h * shared + i % shared) * width;
      sums[at] = out.sums.data() + at * width;
      where[at] = positions[row];
    }
  Chunk chunk;
  const auto place = [&](int64_t page) {
    return pages.data + (table[page] * pages.layers + layer) * 2 * half + head * bytes;
  };
  for (int64_t page = from; page < to; ++page) {
    if (table[page] < 0) continue;
    const int64_t base = page * PAGE, at = chunk.pages++;
    chunk.data[at] = place(page);
    chunk.base[at] = base;
    chunk.whole[at] = base + PAGE - 1 <= where[0] && (!pages.window || base > where[queries - 1] - pages.window);
  }
  if (!chunk.pages) return;
  // Go over the keys or values of all pages and heads, with few of a head's queries at a time: `go` gets the page, where
  // its block lies, the next block in the order of reading, a first query and a constant, how many.
  const int64_t parts = (queries + TOGETHER - 1) / TOGETHER;
  const auto by_tiles = [&](int64_t offset, const uint8_t* after, auto go) {
    for (int64_t page = 0; page < chunk.pages; ++page)
      for (int64_t h = 0; h < count; ++h) {
        const uint8_t* at = chunk.data[page] + offset + h * bytes;
        const uint8_t* ahead = h + 1 < count             ? at + bytes
                               : page + 1 < chunk.pages ? chunk.data[page + 1] + offset
                                                        : after;
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t begin = part * queries / parts, a = h * queries + begin;
          switch ((part + 1) * queries / parts - begin) {
            case 1: go(page, at, ahead, a, std::integral_constant<int, 1>()); break;
            case 2: go(page, at, ahead, a, std::integral_constant<int, 2>()); break;
            case 3: go(page, at, ahead, a, std::integral_constant<int, 3>()); break;
            case 4: go(page, at, ahead, a, std::integral_constant<int, 4>()); break;
#if defined(__AVX512F__)
            case 5: go(page, at, ahead, a, std::integral_constant<int, 5>()); break;
            case 6: go(page, at, ahead, a, std::integral_constant<int, 6>()); break;
#endif
          }
        }
      }
  };
  alignas(64) F x[CHUNK * QUERIES][2];
  const uint8_t* values = chunk.data[0] + half;
  by_tiles(0, values, [&](int64_t page, const uint8_t* at, const uint8_t* ahead, int64_t a, auto r) {
    score<K, r()>(rows + a, at, of.dim / UNITS<K>, ahead, x + page * count * queries + a);
  });
  weights<K>(chunk, count * queries, x, where, pages.window, of.scale, of.cap, values + bytes, values + count * bytes,
             out.row_max.data(), out.row_sum.data());
  const uint8_t* next = to < block.pages && table[to] >= 0 ? place(to) : values;
  by_tiles(half, next, [&](int64_t page, const uint8_t* at, const uint8_t* ahead, int64_t a, auto r) {
    weigh<K, r()>(x + page * count * queries + a, at, of.dim, ahead, sums + a);
  });
}

// A share of a step's attention: some heads of K and V, and some chunks of a block's pages.
struct Task {
  int64_t block, head, head_end, chunk, chunk_end;
};

// Which pages of a sequence are attended to: all, those before its front ends, or those after it.
enum Side { WHOLE, FRONT, REST };

// Attention to earlier pages, by (row, head): sums without padding, the largest score, and the sum of weights.
struct Earlier {
  const float *sums, *row_max, *row_sum;
};

// Attention of a whole step in one layer, called by every thread of a team; `out` is (rows, heads * dim).
struct Attention {
  std::vector<Block> blocks;
  std::vector<Task> tasks, joins;    // joins: where the chunks of a block are shared out, what merges them
  std::vector<int64_t> firsts;       // of each block, its first chunk among all
  std::vector<Partial> partials;     // by (chunk, head of K and V), where chunks are shared out
  std::vector<int64_t> spans;        // by the same: how many chunks are merged there
  std::vector<int64_t> shares;       // of each thread, its first task, where threads take equal numbers of pages
  bool split = false;

  // With `even` every thread takes as many pages as every other, as far as chunks allow, and keeps to them. Of each
  // sequence one side of its front is attended to: whole chunks of pages, as many as `fronts` says.
  void plan(const Heads& of, const Pages& pages, const int64_t* positions, const int64_t* ends, int64_t sequences,
            int threads, bool even = false, Side side = WHOLE, const int64_t* fronts = nullptr) {
    blocks.clear(), firsts.assign(1, 0);
    const int64_t together = std::max<int64_t>(1, IN_CACHE / of.shared());
    int64_t first = 0, longest = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      for (; first < ends[s]; first = std::min(first + together, ends[s])) {
        const int64_t last = std::min(first + together, ends[s]);
        const int64_t seen = pages.window ? std::max<int64_t>(0, positions[first] - pages.window + 1) / PAGE : 0;
        const int64_t start = side == REST ? fronts[s] : seen;
        blocks.push_back({s, first, last, start, side == FRONT ? fronts[s] : positions[last - 1] / PAGE + 1});
        const int64_t chunks = (blocks.back().pages - 1) / CHUNK - start / CHUNK + 1;
        firsts.push_back(firsts.back() + chunks);
        longest = std::max(longest, chunks);
      }
    }
    const int64_t enough = 4 * threads;
    share(of, of.kv_heads, even && threads > 1);
    shares.clear();
    split = even ? threads > 1 : side == REST || (longest > 1 && int64_t(tasks.size()) < enough);
    if (even && split) share_evenly(threads);
    for (int64_t heads = of.kv_heads; !even && (split || int64_t(tasks.size()) < enough); heads = (heads + 1) / 2) {
      share(of, heads, split);
      if (heads == 1 || int64_t(tasks.size()) >= enough) break;
    }
    if (!split) return;
    if (int64_t(partials.size()) < firsts.back() * of.kv_heads) {
      partials.resize(firsts.back() * of.kv_heads);
      spans.resize(partials.size());
    }
    std::swap(tasks, joins), share(of, 1, false), std::swap(tasks, joins);
  }

  // With `row_max` and `row_sum`, (rows, heads) each, sums stay unscaled, to be merged with those over other pages.
  void run(const Heads& of, const Pages& pages, int64_t layer, const float* q, const int64_t* positions, float* out,
           float* row_max = nullptr, float* row_sum = nullptr) {
    if (split) chunks(of, pages, layer, q, positions);
    const std::vector<Task>& last = split ? joins : tasks;
#pragma omp for schedule(dynamic, 1)
    for (size_t task = 0; task < last.size(); ++task) {
      const Task& t = last[task];
      reset(of, t);
      if (split) {
        add_all(of, t);
      } else {
        merge_chunks(of, pages, layer, q, positions, t);
      }
      end(of, t, out, row_max, row_sum);
    }
  }

  // Attend to the chunks of the pages after the fronts, each for itself; `join` merges them later.
  void chunks(const Heads& of, const Pages& pages, int64_t layer, const float* q, const int64_t* positions) {
    if (!shares.empty()) {
#pragma omp for schedule(static, 1)
      for (size_t next = 1; next < shares.size(); ++next)
        for (int64_t task = shares[next - 1]; task < shares[next]; ++task)
          apart(of, pages, layer, q, positions, tasks[task]);
      return;
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t task = 0; task < tasks.size(); ++task) apart(of, pages, layer, q, positions, tasks[task]);
  }

  // Merge the chunks after the fronts, in order, into the attention to the fronts.
  void join(const Heads& of, const Earlier& earlier, float* out) {
#pragma omp for schedule(dynamic, 1)
    for (size_t task = 0; task < joins.size(); ++task) {
      const Task& t = joins[task];
      reset(of, t);
      each_query(of, t, [&](int64_t i, int64_t at) {
        total().row_max[i] = earlier.row_max[at], total().row_sum[i] = earlier.row_sum[at];
        std::memcpy(total().sums.data() + i * of.width(), earlier.sums + at * of.dim, of.dim * 4);
      });
      add_all(of, t);
      end(of, t, out, nullptr, nullptr);
    }
  }

 private:
  static Partial& total() {
    static thread_local Partial partial;
    return partial;
  }

  static Partial& one() {
    static thread_local Partial partial;
    return partial;
  }

  void reset(const Heads& of, const Task& t) {
    total().reset((t.head_end - t.head) * (blocks[t.block].last - blocks[t.block].first) * of.shared(), of.width());
  }

  // Attend to a chunk of a task's block.
  void chunk(const Heads& of, const Pages& pages, int64_t layer, const float* q, const int64_t* positions,
             const Task& t, int64_t number) {
    const Block& b = blocks[t.block];
    const int64_t begin = (b.page / CHUNK + number) * CHUNK;
    const int64_t from = std::max(b.page, begin), to = std::min(b.pages, begin + CHUNK);
    one().reset((t.head_end - t.head) * (b.last - b.first) * of.shared(), of.width());
    auto* go = pages.kind == BF16 ? attend<BF16> : pages.kind == FP16 ? attend<FP16> : attend<FP32>;
    go(of, pages, layer, b, t.head, t.head_end, from, to, q, positions, one());
  }

  // Attend to a task's chunks, and merge them in order.
  void merge_chunks(const Heads& of, const Pages& pages, int64_t layer, const float* q, const int64_t* positions,
                    const Task& t) {
    for (int64_t number = t.chunk; number < t.chunk_end; ++number) {
      chunk(of, pages, layer, q, positions, t, number);
      add(of, one());
    }
  }

  // Attend to a task's chunks, merge them in order, and keep the result: several chunks only from a block's first on.
  void apart(const Heads& of, const Pages& pages, int64_t layer, const float* q, const int64_t* positions,
             const Task& t) {
    const int64_t queries = (blocks[t.block].last - blocks[t.block].first) * of.shared();
    reset(of, t);
    merge_chunks(of, pages, layer, q, positions, t);
    for (int64_t h = t.head; h < t.head_end; ++h) {
      const int64_t at = (firsts[t.block] + t.chunk) * of.kv_heads + h;
      partials[at].take(total(), (h - t.head) * queries, queries, of.width());
      spans[at] = t.chunk_end - t.chunk;
    }
  }

  // Merge what was kept of the chunks of a join, in order.
  void add_all(const Heads& of, const Task& t) {
    for (int64_t number = t.chunk; number < t.chunk_end;) {
      const int64_t at = (firsts[t.block] + number) * of.kv_heads + t.head;
      add(of, partials[at]);
      number += spans[at];
    }
  }

  void add(const Heads& of, const Partial& from) {
    const int64_t width = of.width();
    Partial& to = total();
    for (size_t i = 0; i < from.row_max.size(); ++i)
      merge(to.row_max[i], to.row_sum[i], to.sums.data() + i * width, from.row_max[i], from.row_sum[i],
            from.sums.data() + i * width, width);
  }

  // Call `go` with the number of each of a task's queries, and its place among all (rows, heads).
  template <class Go>
  void each_query(const Heads& of, const Task& t, Go go) const {
    const Block& b = blocks[t.block];
    const int64_t shared = of.shared(), queries = (b.last - b.first) * shared;
    for (int64_t h = t.head, i = 0; h < t.head_end; ++h)
      for (int64_t query = 0; query < queries; ++query, ++i)
        go(i, (b.first + query / shared) * of.heads + h * shared + query % shared);
  }

  void end(const Heads& of, const Task& t, float* out, float* row_max, float* row_sum) const {
    const int64_t width = of.width();
    const Partial& from = total();
    each_query(of, t, [&](int64_t i, int64_t at) {
      const float inverse = row_max ? 1.0f : 1.0f / from.row_sum[i];
      for (int64_t d = 0; d < of.dim; ++d) out[at * of.dim + d] = from.sums[i * width + d] * inverse;
      if (row_max) row_max[at] = from.row_max[i], row_sum[at] = from.row_sum[i];
    });
  }

  // Share out all blocks: so many heads of K and V together where a block's queries are few, and each chunk apart or not.
  void share(const Heads& of, int64_t heads, bool apart) {
    tasks.clear();
    for (int64_t b = 0; b < int64_t(blocks.size()); ++b) {
      const int64_t queries = (blocks[b].last - blocks[b].first) * of.shared(), chunks = firsts[b + 1] - firsts[b];
      const int64_t each = queries > 8 ? 1 : std::min(heads, QUERIES / queries);
      for (int64_t head = 0; head < of.kv_heads; head += each)
        for (int64_t chunk = 0; chunk < chunks; chunk += apart ? 1 : chunks)
          tasks.push_back({b, head, std::min(head + each, of.kv_heads), chunk, apart ? chunk + 1 : chunks});
    }
  }

  // Cut the tasks, each a chunk, where the threads' numbers of pages (times heads) are most alike. From a block's first
  // chunk on, those of one thread become one task, which merges them.
  void share_evenly(int threads) {
    std::vector<int64_t> before(1, 0);
    for (const Task& t : tasks) {
      const Block& b = blocks[t.block];
      const int64_t begin = (b.page / CHUNK + t.chunk) * CHUNK;
      const int64_t pages = std::min(b.pages, begin + CHUNK) - std::max(b.page, begin);
      before.push_back(before.back() + pages * (t.head_end - t.head));
    }
    std::vector<Task> chunks;
    std::swap(chunks, tasks);
    for (int64_t thread = 0, next = 0; thread <= threads; ++thread) {
      const int64_t goal = before.back() * thread / threads;
      const int64_t at = std::lower_bound(before.begin(), before.end(), goal) - before.begin();
      const int64_t cut = at && goal - before[at - 1] < before[at] - goal ? at - 1 : at;
      for (const int64_t first = tasks.size(); next < cut; ++next) {
        const Task& t = chunks[next];
        const bool goes_on = int64_t(tasks.size()) > first && t.chunk && tasks.back().chunk == 0 &&
                             tasks.back().block == t.block && tasks.back().head == t.head;
        if (goes_on) {
          tasks.back().chunk_end = t.chunk_end;
        } else {
          tasks.push_back(t);
        }
      }
      shares.push_back(tasks.size());
    }
  }
};

}  // namespace spillway
