// `paged_attention` on a CPU: any positions, page tables, windows and grouped heads; fp32, bf16 and fp16 pages.
//
// A sequence's pages are taken in chunks that begin at fixed positions. Within a chunk a row goes page by page, chunks are
// merged in order: what a row gets is one chain of operations, whoever else is in the batch, wherever the pages lie, and
// however the chunks were shared out to threads.
#pragma once
#include <vector>

#include "linear.h"

namespace spillway {

constexpr int PAGE = 32, CHUNK = 8;        // tokens a page, pages a chunk
constexpr int QUERIES = 64;                // query heads that attend to a page together
constexpr float NOTHING = -1e30f;          // the largest score of no token

// The pages of one layer group, (pages, layers, 2, kv heads, PAGE, dim), and every sequence's page table.
struct Pages {
  uint8_t* data;
  Kind kind;
  int64_t layers, window;                  // window 0: none
  const int32_t* tables;                   // of all sequences, one after another; -1 is a page that is not resident
  const int64_t* starts;                   // sequences + 1
};

struct Heads {
  int64_t heads, kv_heads, dim;
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
  void reset(int64_t queries, int64_t width) {
    row_max.assign(queries, NOTHING);
    row_sum.assign(queries, 0.0f);
    sums.assign(queries * width, 0.0f);
  }
};

inline void merge(float& row_max, float& row_sum, float* sums, float other_max, float other_sum, const float* other,
                  int64_t width) {
  const float now = row_max > other_max ? row_max : other_max;
  const F both = exponential(F{row_max - now, other_max - now});
  const F mine = splat(float(both[0])), its = splat(float(both[1]));
  row_sum = fma(splat(row_sum), mine, splat(other_sum * both[1]))[0];
  for (int64_t d = 0; d < width; d += 16)
    store(sums + d, fma(load<F>(sums + d), mine, load<F>(other + d) * its));
  row_max = now;
}

// One page of one head as the products want it, and the queries that attend to it. A unit is a number, or a pair of bf16.
// Keys: [4 tokens][16 dims][dim % 4] of lanes dim % 16 / 4, each the four tokens; queries likewise, four times the same.
// Values: [token or pair][width]; in pairs the dims of a group of 32 lie as `pair_up` leaves them.
struct Staged {
  alignas(64) float keys[PAGE * 512], values[PAGE * 512], queries[QUERIES * 4 * 512];
};

// N numbers of 32 or 16 bits, of which `left` are there; the others are 0.
template <class V, class T>
inline V some(const T* from, int64_t left) {
  constexpr int64_t N = sizeof(V) / sizeof(T);
  if (left >= N) return load<V>(from);
  V v{};
  if (left > 0) std::memcpy(&v, from, left * sizeof(T));
  return v;
}

inline F wide(const uint8_t* row, int64_t at, int64_t dim, Kind kind) {
  if (kind == FP32) return some<F>((const float*)row + at, dim - at);
  const H halves = some<H>((const uint16_t*)row + at, dim - at);
  return kind == BF16 ? widen(halves) : widen16(halves);
}

// The next page, which comes into the first cache bit by bit while this one is computed: its values as this one is
// staged, its keys with the products. All at once, it would only wait for memory.
struct Ahead {
  const uint8_t *keys, *values, *more_keys;
  int64_t stride;                          // bytes a call; 0 to stay where it is
};

// Lays out one page of one head.
template <bool PAIRS>
inline void stage(const uint8_t* keys, const uint8_t* values, Ahead ahead, Kind kind, int64_t dim, int64_t width,
                  Staged& s) {
  const int64_t bytes = dim * (kind == FP32 ? 4 : 2), across = PAIRS ? width / 2 : width;
  float* to = s.keys;
  for (int t = 0; t < PAGE; t += 4)
    for (int64_t d = 0; d < across; d += 16, to += 64) {
      F r[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* row = keys + (t + i) * bytes;
        if (i & 1) prefetch(ahead.values), ahead.values += ahead.stride;
        r[i] = PAIRS ? some<F>((const uint16_t*)row + 2 * d, dim - 2 * d) : wide(row, d, dim, kind);
      }
      transpose_lanes(r);
      for (int i = 0; i < 4; ++i) store(to + 16 * i, r[i]);
    }
  if (PAIRS) {
    for (int t = 0; t < PAGE; t += 2)
      for (int64_t d = 0; d < width; d += 32) {
        const uint16_t* row = (const uint16_t*)(values + t * bytes) + d;
        prefetch(ahead.values), ahead.values += ahead.stride;
        pair_up(some<W>(row, dim - d), some<W>(row + dim, dim - d), (F*)(s.values + t / 2 * width + d));
      }
    return;
  }
  for (int t = 0; t < PAGE; ++t)
    for (int64_t d = 0; d < width; d += 16) {
      const uint8_t* row = values + t * bytes;
      if (d & 16) prefetch(ahead.values), ahead.values += ahead.stride;
      store(s.values + t * width + d, wide(row, d, dim, kind));
    }
}

inline F dot(F acc, F k, F q, bool pairs) { return pairs ? dot_pairs(acc, (I)k, (I)q) : fma(k, q, acc); }

// Lays out a query head of as many units as `stage` does keys.
inline void spread(const float* q, int64_t across, float* to) {
  for (int64_t d = 0; d < across; d += 16, to += 64) {
    const F v = load<F>(q + d);
    store(to, lanes<0, 0, 0, 0>(v, v)), store(to + 16, lanes<1, 1, 1, 1>(v, v));
    store(to + 32, lanes<2, 2, 2, 2>(v, v)), store(to + 48, lanes<3, 3, 3, 3>(v, v));
  }
}

// Scores of R query heads with the page's 32 tokens.
template <bool PAIRS, int R>
inline void score(const float* const* q, const Staged& s, int64_t across, Ahead ahead, F (*out)[2]) {
  constexpr int FOURS = PAGE / 4, SOME = R == 1 ? 8 : R <= 4 ? 4 : 2;  // sums that fit into registers
  F sums[R][FOURS];
  for (int from = 0; from < FOURS; from += SOME) {
    F acc[R][SOME] = {};
    const float* keys = s.keys + from * 4 * across;
    for (int64_t u = 0; u < 4 * across; u += 16) {
      F k[SOME];
      for (int i = 0; i < SOME; ++i) {
        k[i] = load<F>(keys + i * 4 * across + u);
        if (i & 1) prefetch(ahead.keys), ahead.keys += ahead.stride;
      }
      for (int r = 0; r < R; ++r) {
        const F b = load<F>(q[r] + u);
        for (int i = 0; i < SOME; ++i) acc[r][i] = dot(acc[r][i], k[i], b, PAIRS);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < SOME; ++i) sums[r][from + i] = acc[r][i];
  }
  for (int r = 0; r < R; ++r) out[r][0] = sum_lanes(sums[r]), out[r][1] = sum_lanes(sums[r] + 4);
}

// Where `pair_up` puts a dim.
inline int64_t paired(int64_t d) { return d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4; }

// sums[r] = sums[r] * keep[r] + weights[r] . values, two vectors of dimensions at a time.
template <bool PAIRS, int R>
inline void weigh(const float (*p)[PAGE], const float* keep, const Staged& s, int64_t width, Ahead ahead,
                  float* const* sums) {
  for (int64_t d = 0; d < width; d += 32) {
    F o[R][2];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) o[r][v] = load<F>(sums[r] + d + 16 * v) * splat(keep[r]);
    for (int t = 0; t < (PAIRS ? PAGE / 2 : PAGE); ++t) {
      prefetch(ahead.more_keys), ahead.more_keys += ahead.stride;
      const F v0 = load<F>(s.values + t * width + d), v1 = load<F>(s.values + t * width + d + 16);
      for (int r = 0; r < R; ++r) {
        const F b = PAIRS ? (F)splat(((const int32_t*)p[r])[t]) : splat(p[r][t]);
        o[r][0] = dot(o[r][0], v0, b, PAIRS);
        o[r][1] = dot(o[r][1], v1, b, PAIRS);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) store(sums[r] + d + 16 * v, o[r][v]);
  }
}

// Attend with R query heads to one page: update their largest score, their sum of weights and their sums.
template <bool PAIRS, int R>
inline void attend_tile(const float* const* q, const int64_t* positions, int64_t base, int64_t window, bool whole,
                        const Staged& s, int64_t width, float scale, Ahead ahead, float* row_max, float* row_sum,
                        float* const* sums) {
  static const float counting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  F x[R][2];
  score<PAIRS, R>(q, s, PAIRS ? width / 2 : width, ahead, x);
  alignas(64) float p[R][PAGE];
  F keep = F{}, fresh = F{}, before = F{};  // R is at most 8
  const F none = splat(-INFINITY);
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) {
      x[r][h] *= splat(scale);
      if (!whole) {
        const F at = load<F>(counting) + splat(float(16 * h));
        const F last = splat(float(positions[r] - base));
        x[r][h] = at > last ? none : x[r][h];
        if (window) x[r][h] = at <= last - splat(float(window)) ? none : x[r][h];
      }
    }
    const float top = largest(max(x[r][0], x[r][1])), now = top > row_max[r] ? top : row_max[r];
    const F e0 = exponential(x[r][0] - splat(now)), e1 = exponential(x[r][1] - splat(now));
    keep[r] = row_max[r] - now;
    row_max[r] = now;
    fresh[r] = sum(e0 + e1);
    if (PAIRS) {
      store((uint16_t*)p[r], narrow(e0));
      store((uint16_t*)p[r] + 16, narrow(e1));
    } else {
      store(p[r], e0);
      store(p[r] + 16, e1);
    }
  }
  for (int r = 0; r < R; ++r) before[r] = row_sum[r];
  keep = exponential(keep);
  const F after = fma(before, keep, fresh);
  for (int r = 0; r < R; ++r) row_sum[r] = after[r];
  float kept[16];
  store(kept, keep);
  weigh<PAIRS, R>(p, kept, s, width, ahead, sums);
}

// Attend with some rows' heads that share one head of K and V to the pages [from, to) of their sequence.
// `q` is (rows, heads, width) fp32, or (…, width / 2) bf16 pairs in the same room; results go into `out`.
inline void attend(const Heads& of, const Pages& pages, int64_t layer, const Block& block, int64_t head, int64_t from,
                   int64_t to, const float* q, const int64_t* positions, float scale, Staged& staged, Partial& out) {
  const int64_t shared = of.shared(), width = of.width(), queries = (block.last - block.first) * shared;
  const bool pairs = pages.kind == BF16;
  const int64_t across = pairs ? width / 2 : width;
  const int64_t bytes = (pages.kind == FP32 ? 4 : 2) * PAGE * of.dim, half = of.kv_heads * bytes;
  const int32_t* table = pages.tables + pages.starts[block.sequence];
  const float* rows[QUERIES];
  float* sums[QUERIES];
  int64_t where[QUERIES];
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t row = block.first + i / shared;
    float* laid = staged.queries + i * 4 * across;
    spread(q + (row * of.heads + head * shared + i % shared) * width, across, laid);
    rows[i] = laid;
    sums[i] = out.sums.data() + i * width;
    where[i] = positions[row];
  }
  for (int64_t page = from; page < to; ++page) {
    if (table[page] < 0) continue;
    const uint8_t* keys = pages.data + (table[page] * pages.layers + layer) * 2 * half + head * bytes;
    const int32_t next = page + 1 < block.pages && table[page + 1] >= 0 ? table[page + 1] : table[page];
    const uint8_t* following = keys + (int64_t(next) - table[page]) * pages.layers * 2 * half;
    Ahead ahead{following, following + half, following + bytes / 2, pages.kind == FP16 ? 32 : 64};
    pairs ? stage<true>(keys, keys + half, ahead, pages.kind, of.dim, width, staged)
          : stage<false>(keys, keys + half, ahead, pages.kind, of.dim, width, staged);
    const int64_t base = page * PAGE;
    const bool whole = base + PAGE - 1 <= where[0] && (!pages.window || base > where[queries - 1] - pages.window);
    const int64_t parts = (queries + 7) / 8;
    for (int64_t part = 0; part < parts; ++part, ahead.stride = 0) {
      const int64_t a = part * queries / parts, n = (part + 1) * queries / parts - a;
#define SPILLWAY_ATTEND_TILE(R)                                                                                   \
  case R:                                                                                                         \
    pairs ? attend_tile<true, R>(rows + a, where + a, base, pages.window, whole, staged, width, scale, ahead,     \
                                 &out.row_max[a], &out.row_sum[a], sums + a)                                      \
          : attend_tile<false, R>(rows + a, where + a, base, pages.window, whole, staged, width, scale, ahead,    \
                                  &out.row_max[a], &out.row_sum[a], sums + a);                                    \
    break;
      switch (n) {
        SPILLWAY_ATTEND_TILE(1)
        SPILLWAY_ATTEND_TILE(2)
        SPILLWAY_ATTEND_TILE(3)
        SPILLWAY_ATTEND_TILE(4)
        SPILLWAY_ATTEND_TILE(5)
        SPILLWAY_ATTEND_TILE(6)
        SPILLWAY_ATTEND_TILE(7)
        SPILLWAY_ATTEND_TILE(8)
      }
#undef SPILLWAY_ATTEND_TILE
    }
  }
}

// Attention of a whole step in one layer, called by every thread of a team; `out` is (rows, heads * dim).
struct Attention {
  std::vector<Block> blocks;
  std::vector<int64_t> firsts;     // of each block, its first chunk among all
  std::vector<Partial> partials;   // by (block, kv head, chunk), where chunks are shared out
  bool split = false;

  void plan(const Heads& of, const Pages& pages, const int64_t* positions, const int64_t* ends, int64_t sequences,
            int threads) {
    blocks.clear(), firsts.assign(1, 0);
    const int64_t together = std::max<int64_t>(1, QUERIES / of.shared());
    int64_t first = 0, longest = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      for (; first < ends[s]; first = std::min(first + together, ends[s])) {
        const int64_t last = std::min(first + together, ends[s]);
        const int64_t start = pages.window ? std::max<int64_t>(0, positions[first] - pages.window + 1) / PAGE : 0;
        blocks.push_back({s, first, last, start, positions[last - 1] / PAGE + 1});
        const int64_t chunks = (blocks.back().pages - 1) / CHUNK - start / CHUNK + 1;
        firsts.push_back(firsts.back() + chunks);
        longest = std::max(longest, chunks);
      }
    }
    split = longest > 1 && int64_t(blocks.size()) * of.kv_heads < 4 * threads;
    if (split && int64_t(partials.size()) < firsts.back() * of.kv_heads) partials.resize(firsts.back() * of.kv_heads);
  }

  // With `row_max` and `row_sum`, (rows, heads) each, sums stay unscaled, to be merged with those over other pages.
  void run(const Heads& of, const Pages& pages, int64_t layer, const float* q, const int64_t* positions, float scale,
           float* out, float* row_max = nullptr, float* row_sum = nullptr) {
    const int64_t width = of.width();
    static thread_local Staged staged;
    static thread_local Partial total, one;
    auto chunk = [&](const Block& b, int64_t head, int64_t number, Partial& into) {
      const int64_t begin = (b.page / CHUNK + number) * CHUNK;
      into.reset((b.last - b.first) * of.shared(), width);
      attend(of, pages, layer, b, head, std::max(b.page, begin), std::min(b.pages, begin + CHUNK), q, positions, scale,
             staged, into);
    };
    auto add = [&](const Partial& from) {
      for (size_t i = 0; i < from.row_max.size(); ++i)
        merge(total.row_max[i], total.row_sum[i], total.sums.data() + i * width, from.row_max[i], from.row_sum[i],
              from.sums.data() + i * width, width);
    };
    auto end = [&](const Block& b, int64_t head) {
      const int64_t shared = of.shared();
      for (int64_t i = 0; i < (b.last - b.first) * shared; ++i) {
        const int64_t at = (b.first + i / shared) * of.heads + head * shared + i % shared;
        const float inverse = row_max ? 1.0f : 1.0f / total.row_sum[i];
        for (int64_t d = 0; d < of.dim; ++d)
          out[at * of.dim + d] = total.sums[i * width + (pages.kind == BF16 ? paired(d) : d)] * inverse;
        if (row_max) row_max[at] = total.row_max[i], row_sum[at] = total.row_sum[i];
      }
    };
    const int64_t count = int64_t(blocks.size()), tasks = count * of.kv_heads;
    if (split) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < firsts.back() * of.kv_heads; ++task) {
        const int64_t head = task % of.kv_heads, number = task / of.kv_heads;
        int64_t b = 0;
        while (firsts[b + 1] <= number) ++b;
        chunk(blocks[b], head, number - firsts[b], partials[task]);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const Block& b = blocks[task / of.kv_heads];
      const int64_t head = task % of.kv_heads, first = firsts[task / of.kv_heads];
      total.reset((b.last - b.first) * of.shared(), width);
      for (int64_t number = first; number < firsts[task / of.kv_heads + 1]; ++number) {
        if (!split) chunk(b, head, number - first, one);
        add(split ? partials[number * of.kv_heads + head] : one);
      }
      end(b, head);
    }
  }
};

}  // namespace spillway
