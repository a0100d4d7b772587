// Linears over a few or many rows. A row of the result is added up along the inputs in one order (in fp32 by stretches),
// whatever rows are computed beside it: its bits never depend on the batch.
//
// Weights are packed into tiles of 64 outputs, read front to back once a step:
//   fp32 [input][64]; bf16 [pair of inputs][64][2]; bytes and nibbles in groups of 32 inputs, [scale, bf16][64] and then
//   [4 inputs][64][4], or [8 inputs][64][4 bytes], of which the low nibbles are the first four inputs.
// Bytes and nibbles are unsigned (128 is zero, or 8); the inputs are then rounded to signed bytes, with a scale a group.
// int4 is ours (see int4.h): a tile begins with [exponent][64], a group with [scale][64], [shift][64].
// Kinds of GGUF files keep what the file holds: fp16 [input][64]; Q8_0, Q4_0, Q5_0 and IQ4_NL with scales in fp16, Q4_1 and
// Q5_1 with [scale][64], [offset][64]; and those in blocks of 256 inputs, which begin with scales in fp16, [64] (Q4_K and
// Q5_K: and of minima, [64]), of 8 groups:
//   Q4_K, Q5_K [scale][64], [minimum][64]; IQ4_XS [scale][64]; then nibbles
//   Q6_K [16 inputs, scale][64], [16 inputs][64][4 bytes, of four high pairs of bits], [8 inputs][64][4 bytes]
// The fifth bits of Q5_0, Q5_1 and Q5_K stand before a group's nibbles, [64][4 bytes]: input i's is bit i / 4 of byte i % 4.
// Nibbles of int4, IQ4_NL and IQ4_XS stand for the numbers of NIBBLE_VALUES.
#pragma once
#include <algorithm>
#include <vector>

#include "arena.h"
#include "int4.h"
#include "vectors.h"

namespace spillway {

enum Kind {
  FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, FP16 = 4, Q8_0 = 5, Q4_0 = 6, Q4_K = 7, Q6_K = 8, IQ4_NL = 9, IQ4_XS = 10,
  Q4_1 = 11, Q5_0 = 12, Q5_1 = 13, Q5_K = 14
};
enum Form { FLOATS = 1, HALVES = 2, BYTES = 4 };  // of inputs; a set of them may be asked for

constexpr int TILE = 64, VECTORS = TILE / 16;
constexpr int BLOCK = 256;  // inputs, of kinds with scales of scales
#if defined(__AVX512F__)
constexpr int WIDE = 4, ROWS = 6;  // vectors of outputs and rows whose sums stay in registers
// Zen 4 reads whole tiles ahead by itself: 56 GB/s of nibbles, where it reads 40 while it is asked for lines.
inline const bool READS_AHEAD = __builtin_cpu_is("amd");
#else
constexpr int WIDE = 1, ROWS = 4;
constexpr bool READS_AHEAD = false;
#endif
// What of a tile stays in the second cache while rows pass over it in turns. Few rows wait for memory as long as they
// compute: their parts of bytes and nibbles stay in the first caches, and every pass asks for some of the next part.
constexpr int64_t PART_BYTES = 320 << 10, FEW_PART_BYTES = 24 << 10, FEW_ROWS = 48;
constexpr int64_t LINE = 64;  // bytes that memory brings together

// Ask for a line of codes, keys or values before it is needed. Zen 4 reads 10 to 25 % more a second into its second cache
// than into the first.
INLINED void ask_for(const void* line) { READS_AHEAD ? prefetch_beyond(line) : prefetch(line); }

// Whole numbers need registers for two sums: many rows take fewer vectors at a time.
constexpr bool in_one_pass(int64_t rows) { return WIDE == VECTORS && rows <= 3; }

inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline Form form_of(Kind kind) {
  return kind == FP32 || kind == FP16 ? FLOATS : kind == BF16 ? HALVES : BYTES;
}
constexpr bool in_blocks(Kind kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K || kind == IQ4_XS; }
constexpr bool with_offset(Kind kind) { return kind == Q4_K || kind == Q5_K || kind == Q4_1 || kind == Q5_1; }
constexpr bool looked_up(Kind kind) { return kind == INT4 || kind == IQ4_NL || kind == IQ4_XS; }
constexpr int bits(Kind kind) {
  switch (kind) {
    case FP32: return 32;
    case BF16:
    case FP16: return 16;
    case INT8:
    case Q8_0: return 8;
    case Q6_K: return 6;
    case Q5_0:
    case Q5_1:
    case Q5_K: return 5;
    default: return 4;
  }
}
// The code that stands for zero, of kinds without offsets.
constexpr int32_t zero(Kind kind) {
  return bits(kind) == 8 || looked_up(kind) ? 128 : with_offset(kind) ? 0 : 1 << (bits(kind) - 1);
}
// How many inputs lie in one block, and the bytes of so many in a tile: what the block begins with, then its groups, which
// begin with scales.
constexpr int64_t block_inputs(Kind kind) { return in_blocks(kind) ? BLOCK : GROUP; }
constexpr int64_t tile_head(Kind kind) { return kind == INT4 ? TILE : 0; }
constexpr int64_t block_head(Kind kind) { return !in_blocks(kind) ? 0 : with_offset(kind) ? TILE * 4 : TILE * 2; }
constexpr int64_t group_head(Kind kind) {
  if (bits(kind) > 8) return 0;
  return kind == IQ4_XS ? TILE : with_offset(kind) && !in_blocks(kind) ? TILE * 4 : TILE * 2;
}
constexpr int64_t group_bytes(Kind kind) { return group_head(kind) + int64_t(TILE) * GROUP * bits(kind) / 8; }
constexpr int64_t block_bytes(Kind kind) {
  return block_head(kind) + block_inputs(kind) / GROUP * group_bytes(kind);
}
constexpr int64_t codes_at(Kind kind) { return group_head(kind) + (bits(kind) == 5 ? TILE * 4 : 0); }  // in a group

// Rows in the forms that a linear takes.
struct Input {
  int forms = 0;
  int64_t stride = 0, groups = 0;  // numbers and groups a row
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  std::vector<int8_t> bytes;
  std::vector<float> scales;  // of a group of bytes
  std::vector<int32_t> sums;  // of the bytes of half a group

  void shape(int as, int64_t rows, int64_t inputs) {
    forms = as;
    groups = up(inputs, GROUP) / GROUP;
    stride = groups * GROUP;
    if (as & FLOATS) room(floats, rows * stride);
    if (as & HALVES) room(halves, rows * stride);
    if (as & BYTES) room(bytes, rows * stride), room(scales, rows * groups), room(sums, rows * groups * 2);
  }
  // Round one row; `from` has room up to a multiple of GROUP, which is set to 0 here.
  void put(int64_t row, float* from, int64_t inputs) {
    for (int64_t i = inputs; i < stride; ++i) from[i] = 0;
    if (forms & FLOATS) std::memcpy(floats.data() + row * stride, from, stride * 4);
    if (forms & HALVES)
      for (int64_t i = 0; i < stride; i += 16) store(halves.data() + row * stride + i, narrow(load<F>(from + i)));
    if (forms & BYTES)
      for (int64_t g = 0; g < groups; ++g) round(row * groups + g, from + g * GROUP);
  }

 private:
  template <class T>
  static void room(std::vector<T>& memory, int64_t size) {
    if (int64_t(memory.size()) < size) memory.resize(size);
  }
  void round(int64_t group, const float* from) {
    F most = F{};
    for (int i = 0; i < GROUP; i += 16) {
      const F x = load<F>(from + i);
      most = max(most, max(x, -x));
    }
    const float scale = largest(most) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int8_t* to = bytes.data() + group * GROUP;
    for (int half = 0; half < 2; ++half) {
      int32_t total = 0;
      for (int i = half * 16; i < half * 16 + 16; ++i) {
        to[i] = int8_t(std::nearbyint(from[i] * inverse));
        total += to[i];
      }
      sums[group * 2 + half] = total;
    }
    scales[group] = scale;
  }
};

// Who asks memory for weights before they are needed: nobody, where the processor reads ahead, which it does as long as
// lines are read in their order; each line for the one 4 KB on; or each pass for its share of the next part.
enum Asking { NOBODY, LINES, PASSES };

// The sums of M rows and V vectors of outputs over the inputs [from, to), added to those in `acc` (rows of TILE). In
// fp32 every 32 inputs have a sum of their own, so that rounding does not add up along many.
constexpr int64_t STRETCH = 32;
INLINED F number(const float* from) { return load<F>(from); }
INLINED F number(const uint16_t* from) { return widen16(load<H>(from)); }
template <int M, int V, class T>
inline void step_floats(const T* w, const float* const* x, int64_t from, int64_t to, float* acc) {
  for (int64_t first = from; first < to; first += STRETCH) {
    F s[M][V] = {};
    for (int64_t k = first; k < first + STRETCH; ++k) {
      F b[V];
      UNROLLED(v, V) {
        b[v] = number(w + k * TILE + 16 * v);
        prefetch(w + k * TILE + 16 * v + 16 * TILE);
      }
      UNROLLED(m, M)
        UNROLLED(v, V) s[m][v] = fma(splat(x[m][k]), b[v], s[m][v]);
    }
    UNROLLED(m, M)
      UNROLLED(v, V) store(acc + m * TILE + 16 * v, load<F>(acc + m * TILE + 16 * v) + s[m][v]);
  }
}

template <int M, int V, Asking BY>
inline void step_bf16(const int32_t* w, const int32_t* const* x, int64_t from, int64_t to, float* acc) {
  F s[M][V];
  UNROLLED(m, M)
    UNROLLED(v, V) s[m][v] = load<F>(acc + m * TILE + 16 * v);
  for (int64_t k = from; k < to; ++k) {
    I b[V];
    UNROLLED(v, V) {
      b[v] = load<I>(w + k * TILE + 16 * v);
      if (BY != NOBODY) prefetch(w + k * TILE + 16 * v + 16 * TILE);
    }
    UNROLLED(m, M)
      UNROLLED(v, V) s[m][v] = dot_pairs(s[m][v], b[v], splat(x[m][k]));
  }
  UNROLLED(m, M)
    UNROLLED(v, V) store(acc + m * TILE + 16 * v, s[m][v]);
}

// The share of a pass in what is asked for ahead of all: `lines` a group of inputs, from `at` on.
struct Ahead {
  const uint8_t* at;
  int64_t lines;

  // The share of pass `number` of `count` over some groups.
  Ahead share(int64_t number, int64_t count, int64_t groups) const {
    const int64_t each = (lines + count - 1) / count;
    return {at + number * each * groups * LINE, each};
  }
  void ask() {
    for (int64_t n = 0; n < lines; ++n, at += LINE) prefetch_beyond(at);
  }
};

// Rounded rows: their bytes in fours, the scales of groups, the sums of half groups.
template <int M>
struct Rounded {
  const int32_t* x[M];
  const float* scale[M];
  const int32_t* total[M];
};

// The scales of a group's outputs, 16 of them from `at` on in their part of the tile; `head` is of their block or tile.
template <Kind K>
INLINED F group_scale(const uint8_t* group, int at, F head) {
  if (K == INT4) return int4_scale((I)head, unsigned_bytes(group + at));
  if (K == IQ4_XS) return to_float(signed_bytes(group + at)) * head;
  if (in_blocks(K)) return to_float(unsigned_bytes(group + at)) * head;
  const H kept = load<H>(group + at * 2);
  return K == INT8 ? widen(kept) : widen16(kept);
}

// What is added to 16 of a group's weights; `head` is their block's minimum, negative, or the scale of int4.
template <Kind K>
INLINED F group_offset(const uint8_t* group, int at, F head) {
  if (K == INT4) return to_float(unsigned_bytes(group + TILE + at) - splat(SHIFT_ZERO)) * head;
  if (in_blocks(K)) return to_float(unsigned_bytes(group + TILE + at)) * head;
  return widen16(load<H>(group + TILE * 2 + at * 2));
}

// `first` is the first of the V vectors in its tile, whose blocks begin at `w`; `acc` begins at it.
template <int M, int V, Kind K, Asking BY>
inline void step_codes(const uint8_t* w, int first, const Rounded<M>& in, int64_t from, int64_t to, Ahead ahead,
                       float* acc) {
  constexpr int GROUPS = block_inputs(K) / GROUP, EACH = bits(K) == 8 ? 1 : 2;  // codes in a byte
  const I low_bits = splat(0x0f0f0f0f), fifth = splat(0x10101010);
  F s[M][V], heads[V] = {}, minima[V] = {};
  UNROLLED(m, M)
    UNROLLED(v, V) s[m][v] = load<F>(acc + m * TILE + 16 * v);
  if (K == INT4)
    UNROLLED(v, V) heads[v] = (F)unsigned_bytes(w - TILE + 16 * (first + v));
  for (int64_t b = from; b < to; ++b) {
    const uint8_t* block = w + b * block_bytes(K);
    if (in_blocks(K))
      UNROLLED(v, V) {
        heads[v] = widen16(load<H>(block + 32 * (first + v)));
        if (with_offset(K)) minima[v] = -widen16(load<H>(block + TILE * 2 + 32 * (first + v)));
      }
    for (int i = 0; i < GROUPS; ++i) {
      const int64_t g = b * GROUPS + i;
      const uint8_t* at = block + block_head(K) + i * group_bytes(K);
      const uint8_t* codes = at + codes_at(K) + 64 * first;
      int32_t total[M];
      I t[M][V], five[V];
      if (BY == PASSES) ahead.ask();
      if (BY == NOBODY) UNROLLED(i, codes_at(K) / LINE) prefetch(at + i * LINE);  // scales, which are used last
      UNROLLED(m, M) total[m] = in.total[m][2 * g] + in.total[m][2 * g + 1];
      UNROLLED(v, V) {
        UNROLLED(m, M) t[m][v] = splat(-zero(K) * total[m]);
        if (bits(K) == 5) five[v] = load<I>(at + group_head(K) + 64 * (first + v));
      }
      UNROLLED(k, GROUP / 4 / EACH) {
        UNROLLED(v, V) {
          const I c = load<I>(codes + k * TILE * 4 + 64 * v);
          if (BY != NOBODY) ask_for(codes + k * TILE * 4 + 64 * v + 4096);
          I parts[2] = {EACH == 1 ? c : c & low_bits, c >> 4 & low_bits};
          UNROLLED(part, EACH) {
            const int n = k * EACH + part;
            if (bits(K) == 5) parts[part] |= (n < 4 ? five[v] << (4 - n) : five[v] >> (n - 4)) & fifth;
            if (looked_up(K)) parts[part] = nibble_values(parts[part]);
            UNROLLED(m, M)
              t[m][v] = dot_bytes(t[m][v], parts[part], splat(in.x[m][g * GROUP / 4 + n]));
          }
        }
      }
      UNROLLED(v, V) {
        const F scale = group_scale<K>(at, 16 * (first + v), heads[v]);
        UNROLLED(m, M) s[m][v] = fma(to_float(t[m][v]), scale * splat(in.scale[m][g]), s[m][v]);
        if (!with_offset(K) && K != INT4) continue;
        const F offset = group_offset<K>(at, 16 * (first + v), K == INT4 ? scale : minima[v]);
        UNROLLED(m, M) s[m][v] = fma(offset, splat(in.scale[m][g] * float(total[m])), s[m][v]);
      }
    }
  }
  UNROLLED(m, M)
    UNROLLED(v, V) store(acc + m * TILE + 16 * v, s[m][v]);
}

// A weight of Q6_K is scale * (code - 32), the scale of 16 inputs a whole number times what the block begins with.
template <int M, int V, Asking BY>
inline void step_q6_k(const uint8_t* w, int first, const Rounded<M>& in, int64_t from, int64_t to, Ahead ahead,
                      float* acc) {
  F s[M][V];
  UNROLLED(m, M)
    UNROLLED(v, V) s[m][v] = load<F>(acc + m * TILE + 16 * v);
  const I low_bits = splat(0x0f0f0f0f), high_bits = splat(0x30303030);
  for (int64_t b = from; b < to; ++b) {
    const uint8_t* block = w + b * block_bytes(Q6_K);
    F scales[V];
    UNROLLED(v, V) scales[v] = widen16(load<H>(block + 32 * (first + v)));
    for (int64_t i = 0; i < BLOCK / GROUP * 2; ++i) {  // halves of groups
      const int64_t g = b * (BLOCK / GROUP) + i / 2, half = i % 2;
      const uint8_t* at = block + block_head(Q6_K) + i / 2 * group_bytes(Q6_K);
      const uint8_t* pairs = at + TILE * 2 + half * TILE * 4 + 64 * first;
      const uint8_t* codes = at + TILE * 2 + TILE * GROUP / 4 + half * 2 * TILE * 4 + 64 * first;
      I t[M][V];
      if (BY == PASSES && !half) ahead.ask();
      if (BY == NOBODY && !half)  // scales, and the pairs of both halves
        UNROLLED(i, (TILE * 2 + TILE * GROUP / 4) / LINE) prefetch(at + i * LINE);
      UNROLLED(m, M)
        UNROLLED(v, V) t[m][v] = splat(-32 * in.total[m][2 * g + half]);
      UNROLLED(v, V) {
        const I h = load<I>(pairs + 64 * v), c0 = load<I>(codes + 64 * v), c1 = load<I>(codes + TILE * 4 + 64 * v);
        if (BY != NOBODY)
          ask_for(pairs + 64 * v + 4096), ask_for(codes + 64 * v + 4096), ask_for(codes + TILE * 4 + 64 * v + 4096);
        const I four[4] = {(c0 & low_bits) | (h << 4 & high_bits), (c0 >> 4 & low_bits) | (h << 2 & high_bits),
                           (c1 & low_bits) | (h & high_bits), (c1 >> 4 & low_bits) | (h >> 2 & high_bits)};
        UNROLLED(k, 4)
          UNROLLED(m, M)
            t[m][v] = dot_bytes(t[m][v], four[k], splat(in.x[m][g * GROUP / 4 + half * 4 + k]));
      }
      UNROLLED(v, V) {
        const F scale = to_float(signed_bytes(at + half * TILE + 16 * (first + v))) * scales[v];
        UNROLLED(m, M) s[m][v] = fma(to_float(t[m][v]), scale * splat(in.scale[m][g]), s[m][v]);
      }
    }
  }
  UNROLLED(m, M)
    UNROLLED(v, V) store(acc + m * TILE + 16 * v, s[m][v]);
}

// Matrices with the same inputs, each of a kind of its own, one after another in one result.
struct Linear {
  struct Tile {
    Kind kind;
    int64_t first, count;  // outputs
    const uint8_t* data;
  };
  int forms = 0;  // that the tiles' kinds take
  int64_t outputs = 0, inputs = 0, groups = 0;
  std::vector<Tile> tiles;
  std::vector<float> bias;  // of whole tiles, or empty

  // Add a matrix, which lies in `memory`. `at(output)` is where an output's row of weights begins (fp32 or bf16), or
  // nullptr for one that is not there. False if there is no memory.
  template <class At>
  bool pack(Arena& memory, Kind as, int64_t outs, int64_t ins, bool half, At at, int threads) {
    return add(memory, as, outs, ins, threads, [&](uint8_t* tile, int n, int64_t output) {
      const void* row = at(output);
      if (!row) return;
      static thread_local std::vector<float> numbers;
      numbers.assign(up(ins, GROUP), 0.0f);
      for (int64_t k = 0; k < ins; ++k)
        numbers[k] = half ? widen(((const uint16_t*)row)[k]) : ((const float*)row)[k];
      if (as == INT4) return put_int4(tile, n, numbers.data());
      for (int64_t g = 0; g < groups; ++g) put(as, tile + g * block_bytes(as), n, numbers.data() + g * GROUP);
    });
  }

  // Add a matrix as a GGUF file holds it, of `row_bytes` an output.
  template <class At>
  bool pack_stored(Arena& memory, Kind as, int64_t outs, int64_t ins, At at, int threads) {
    return add(memory, as, outs, ins, threads, [&](uint8_t* tile, int n, int64_t output) {
      const uint8_t* row = at(output);
      if (row) copy(as, tile, n, row, ins);
    });
  }

  // The outputs of one tile for all rows, into `acc` (rows of TILE floats).
  void tile(int64_t number, const Input& in, int64_t rows, float* acc) const {
    const Tile& of = tiles[number];
    for (int64_t i = 0; i < rows * TILE; i += 16)
      store(acc + i, bias.empty() ? F{} : load<F>(bias.data() + number * TILE + i % TILE));
    const int64_t turns = (rows + ROWS - 1) / ROWS, each = block_bytes(of.kind);
    const bool few = form_of(of.kind) == BYTES && !in_one_pass(rows) && rows <= FEW_ROWS;
    const int64_t part = std::max<int64_t>(1, (few ? FEW_PART_BYTES : PART_BYTES) / each);
    const int64_t blocks = up(inputs, block_inputs(of.kind)) / block_inputs(of.kind);
    const int64_t lines = few ? up(each * GROUP / block_inputs(of.kind), LINE) / LINE : 0;
    for (int64_t g = 0; g < blocks; g += part) {
      const int64_t end = std::min(blocks, g + part);
      const Ahead next{of.data + tile_head(of.kind) + end * each, lines};
      for (int64_t b = 0; b < turns; ++b) {
        const int64_t first = b * rows / turns, last = (b + 1) * rows / turns;
        const Ahead ahead = next.share(b, turns, (end - g) * block_inputs(of.kind) / GROUP);
        block(int(last - first), of, in, first, g, end, ahead, acc + first * TILE);
      }
    }
  }

  int64_t bytes() const {
    int64_t total = 0;
    for (const Tile& tile : tiles) total += tile_bytes(tile.kind, inputs);
    return total;
  }

  // The weights of one output, of a matrix that is alone.
  void weights(int64_t output, float* to) const {
    const Tile& of = tiles[output / TILE];
    const int64_t n = output % TILE;
    for (int64_t i = 0; i < inputs; ++i) to[i] = weight(of.kind, of.data, n, i);
  }

 private:
  // Add tiles; `fill(tile, n, output)` writes one output.
  template <class Fill>
  bool add(Arena& memory, Kind as, int64_t outs, int64_t ins, int threads, Fill fill) {
    const int64_t count = up(outs, TILE) / TILE;
    const int64_t each = tile_bytes(as, ins);
    uint8_t* data = memory.take(count * each);
    if (!data) return false;
    inputs = ins, groups = up(ins, GROUP) / GROUP, forms |= form_of(as);
    for (int64_t t = 0; t < count; ++t)
      tiles.push_back({as, outputs + t * TILE, std::min<int64_t>(TILE, outs - t * TILE), data + t * each});
    outputs += outs;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t t = 0; t < count; ++t)
      for (int n = 0; n < TILE && t * TILE + n < outs; ++n) fill(data + t * each, n, t * TILE + n);
    return true;
  }

  static int64_t tile_bytes(Kind kind, int64_t ins) {
    return tile_head(kind) + up(ins, block_inputs(kind)) / block_inputs(kind) * block_bytes(kind);
  }

  // Where input `i` of output `n` lies in a group of bytes, or of nibbles: the low ones if i % 8 < 4.
  static int64_t byte_at(int64_t n, int64_t i) { return (i / 4 * TILE + n) * 4 + i % 4; }
  static int64_t nibble_at(int64_t n, int64_t i) { return (i / 8 * TILE + n) * 4 + i % 4; }
  static void set_nibble(uint8_t* codes, int64_t n, int64_t i, int code) {
    codes[nibble_at(n, i)] |= uint8_t(i % 8 < 4 ? code : code << 4);
  }
  static int nibble(const uint8_t* codes, int64_t n, int64_t i) {
    return codes[nibble_at(n, i)] >> (i % 8 < 4 ? 0 : 4) & 15;
  }
  static void set_fifth(uint8_t* fifths, int64_t n, int64_t i, int bit) {
    fifths[n * 4 + i % 4] |= uint8_t(bit << i / 4);
  }
  static int fifth(const uint8_t* fifths, int64_t n, int64_t i) { return fifths[n * 4 + i % 4] >> i / 4 & 1; }

  static void put(Kind kind, uint8_t* to, int n, const float* values) {
    if (kind == FP32) {
      for (int i = 0; i < GROUP; ++i) ((float*)to)[i * TILE + n] = values[i];
    } else if (kind == BF16) {
      for (int i = 0; i < GROUP; ++i) ((uint16_t*)to)[(i / 2 * TILE + n) * 2 + i % 2] = narrow(values[i]);
    } else {
      float most = 0;  // becomes 127
      for (int i = 0; i < GROUP; ++i) most = std::max(most, std::fabs(values[i]));
      const uint16_t kept = narrow(most / 127);
      const float scale = widen(kept);  // codes are of the scale as it is kept, so its rounding costs nothing
      ((uint16_t*)to)[n] = kept;
      for (int i = 0; i < GROUP; ++i)
        to[codes_at(kind) + byte_at(n, i)] =
            uint8_t(scale == 0 ? zero(kind) : int(std::nearbyint(values[i] / scale)) + zero(kind));
    }
  }

  // One output in int4; `values` are those of all groups.
  void put_int4(uint8_t* tile, int n, const float* values) const {
    static thread_local std::vector<Int4Line> lines;
    lines.clear();
    for (int64_t g = 0; g < groups; ++g) lines.push_back(fit_int4(values + g * GROUP));
    const int exponent = tile[n] = uint8_t(int4_exponent(lines.data(), groups));
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* group = tile + tile_head(INT4) + g * block_bytes(INT4);
      uint8_t codes[GROUP];
      const Int4Head kept = int4_codes(values + g * GROUP, lines[g], exponent, codes);
      group[n] = kept.scale, group[TILE + n] = kept.shift;
      for (int i = 0; i < GROUP; ++i) set_nibble(group + codes_at(INT4), n, i, codes[i]);
    }
  }

  // Copy the row of an output from a GGUF file: blocks one after another, of which ggml's ggml-common.h has the layout.
  static void copy(Kind kind, uint8_t* to, int n, const uint8_t* row, int64_t ins) {
    const int64_t blocks = ins / block_inputs(kind);
    switch (kind) {
      case FP32:
        for (int64_t i = 0; i < ins; ++i) std::memcpy(to + (i * TILE + n) * 4, row + i * 4, 4);
        return;
      case FP16:
        for (int64_t i = 0; i < ins; ++i) std::memcpy(to + (i * TILE + n) * 2, row + i * 2, 2);
        return;
      case BF16:
        for (int64_t i = 0; i < ins; ++i) std::memcpy(to + ((i / 2 * TILE + n) * 2 + i % 2) * 2, row + i * 2, 2);
        return;
      case Q8_0:
        for (int64_t b = 0; b < blocks; ++b, to += block_bytes(kind), row += 34) {
          std::memcpy(to + n * 2, row, 2);
          for (int i = 0; i < GROUP; ++i) to[TILE * 2 + byte_at(n, i)] = row[2 + i] ^ 0x80;
        }
        return;
      case Q4_0:
      case Q4_1:
      case Q5_0:
      case Q5_1:
      case IQ4_NL: {
        const int scales = with_offset(kind) ? 4 : 2, high = bits(kind) == 5 ? 4 : 0;  // bytes
        for (int64_t b = 0; b < blocks; ++b, to += block_bytes(kind), row += scales + high + 16) {
          std::memcpy(to + n * 2, row, 2);
          if (with_offset(kind)) std::memcpy(to + TILE * 2 + n * 2, row + 2, 2);
          for (int i = 0; i < GROUP; ++i) {
            set_nibble(to + codes_at(kind), n, i, row[scales + high + i % 16] >> (i < 16 ? 0 : 4) & 15);
            if (high) set_fifth(to + group_head(kind), n, i, row[scales + i / 8] >> i % 8 & 1);
          }
        }
        return;
      }
      case Q4_K:
      case Q5_K: {
        const int high = kind == Q5_K ? 32 : 0;  // bytes
        for (int64_t b = 0; b < blocks; ++b, to += block_bytes(kind), row += 144 + high) {
          std::memcpy(to + n * 2, row, 2);
          std::memcpy(to + TILE * 2 + n * 2, row + 2, 2);
          const uint8_t *six = row + 4, *nibbles = row + 16 + high;
          for (int g = 0; g < BLOCK / GROUP; ++g) {
            uint8_t* group = to + block_head(kind) + g * group_bytes(kind);
            group[n] = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | (six[g - 4] >> 6 << 4);
            group[TILE + n] = g < 4 ? six[g + 4] & 63 : (six[g + 4] >> 4) | (six[g] >> 6 << 4);
            for (int i = 0; i < GROUP; ++i) {
              set_nibble(group + codes_at(kind), n, i, nibbles[g / 2 * GROUP + i] >> (g % 2 ? 4 : 0) & 15);
              if (high) set_fifth(group + group_head(kind), n, i, row[16 + i] >> g & 1);
            }
          }
        }
        return;
      }
      case IQ4_XS:
        for (int64_t b = 0; b < blocks; ++b, to += block_bytes(kind), row += 136) {
          std::memcpy(to + n * 2, row, 2);
          for (int g = 0; g < BLOCK / GROUP; ++g) {
            uint8_t* group = to + block_head(kind) + g * group_bytes(kind);
            const int low = row[4 + g / 2] >> (g % 2 * 4) & 15, high = row[2 + g / 4] >> (g % 4 * 2) & 3;
            group[n] = uint8_t((low | high << 4) - 32);
            for (int i = 0; i < GROUP; ++i)
              set_nibble(group + codes_at(kind), n, i, row[8 + g * 16 + i % 16] >> (i < 16 ? 0 : 4) & 15);
          }
        }
        return;
      default:
        for (int64_t b = 0; b < blocks; ++b, to += block_bytes(kind), row += 210) {
          std::memcpy(to + n * 2, row + 208, 2);
          for (int at = 0; at < BLOCK; ++at) {
            uint8_t* group = to + block_head(Q6_K) + at / GROUP * group_bytes(Q6_K);
            const int i = at % GROUP, half = at / 128, r = at % 128;
            if (i % 16 == 0) group[i / 16 * TILE + n] = row[192 + at / 16];
            const int high = row[128 + half * 32 + r % 32] >> (r / 32 * 2) & 3;
            group[TILE * 2 + byte_at(n, i / 16 * 4 + i % 4)] |= uint8_t(high << (i % 16 / 4 * 2));
            set_nibble(group + TILE * 2 + TILE * GROUP / 4, n, i, row[half * 64 + r % 64] >> (r / 64 * 4) & 15);
          }
        }
    }
  }

  static float weight(Kind kind, const uint8_t* tile, int64_t n, int64_t input) {
    const uint8_t* block = tile + tile_head(kind) + input / block_inputs(kind) * block_bytes(kind);
    const auto half = [](const uint8_t* from, int64_t at) {
      uint16_t bits;
      std::memcpy(&bits, from + at * 2, 2);
      return bits;
    };
    const int64_t i = input % GROUP;
    const uint8_t* group = block + block_head(kind) + input % block_inputs(kind) / GROUP * group_bytes(kind);
    const auto code = [&] {
      const int four = nibble(group + codes_at(kind), n, i);
      if (looked_up(kind)) return int(NIBBLE_VALUES[four]);
      return bits(kind) == 5 ? four | fifth(group + group_head(kind), n, i) << 4 : four;
    };
    switch (kind) {
      case FP32: return ((const float*)block)[i * TILE + n];
      case FP16: return widen16(half(block, i * TILE + n));
      case BF16: return widen(half(block, (i / 2 * TILE + n) * 2 + i % 2));
      case INT8: return widen(half(block, n)) * float(block[codes_at(kind) + byte_at(n, i)] - zero(kind));
      case INT4: return int4_scale(tile[n], group[n]) * float(code() - zero(kind) + group[TILE + n] - SHIFT_ZERO);
      case Q8_0: return widen16(half(block, n)) * float(block[codes_at(kind) + byte_at(n, i)] - zero(kind));
      case Q4_0:
      case Q5_0:
      case IQ4_NL: return widen16(half(block, n)) * float(code() - zero(kind));
      case Q4_1:
      case Q5_1: return widen16(half(block, n)) * float(code()) + widen16(half(block, TILE + n));
      case IQ4_XS: return widen16(half(block, n)) * float(int8_t(group[n])) * float(code() - zero(kind));
      case Q4_K:
      case Q5_K: {
        const float scale = widen16(half(block, n)) * float(group[n]);
        const float minimum = widen16(half(block, TILE + n)) * float(group[TILE + n]);
        return scale * float(code()) - minimum;
      }
      default: {
        const int pairs = group[TILE * 2 + byte_at(n, i / 16 * 4 + i % 4)];
        const int six = nibble(group + TILE * 2 + TILE * GROUP / 4, n, i) | (pairs >> (i % 16 / 4 * 2) & 3) << 4;
        return widen16(half(block, n)) * float(int8_t(group[i / 16 * TILE + n])) * float(six - zero(kind));
      }
    }
  }

  static void block(int m, const Tile& of, const Input& in, int64_t first, int64_t from, int64_t to, Ahead ahead,
                    float* acc) {
    switch (m) {
      case 1: return some<1>(of, in, first, from, to, ahead, acc);
      case 2: return some<2>(of, in, first, from, to, ahead, acc);
      case 3: return some<3>(of, in, first, from, to, ahead, acc);
      case 4: return some<4>(of, in, first, from, to, ahead, acc);
#if defined(__AVX512F__)
      case 5: return some<5>(of, in, first, from, to, ahead, acc);
      case 6: return some<6>(of, in, first, from, to, ahead, acc);
#endif
    }
  }

  // Rows from `first` on, blocks [from, to).
  template <int M>
  static void some(const Tile& of, const Input& in, int64_t first, int64_t from, int64_t to, Ahead ahead, float* acc) {
    const uint8_t* w = of.data + tile_head(of.kind);
    if (of.kind == FP32 || of.kind == FP16) {
      const float* x[M];
      for (int m = 0; m < M; ++m) x[m] = in.floats.data() + (first + m) * in.stride;
      for (int v = 0; v < VECTORS; v += WIDE)
        if (of.kind == FP32)
          step_floats<M, WIDE>((const float*)w + 16 * v, x, from * GROUP, to * GROUP, acc + 16 * v);
        else
          step_floats<M, WIDE>((const uint16_t*)w + 16 * v, x, from * GROUP, to * GROUP, acc + 16 * v);
      return;
    }
    if (of.kind == BF16) {
      const int32_t* x[M];
      for (int m = 0; m < M; ++m) x[m] = (const int32_t*)(in.halves.data() + (first + m) * in.stride);
      const auto step = READS_AHEAD ? step_bf16<M, WIDE, NOBODY> : step_bf16<M, WIDE, LINES>;
      for (int v = 0; v < VECTORS; v += WIDE)
        step((const int32_t*)w + 16 * v, x, from * GROUP / 2, to * GROUP / 2, acc + 16 * v);
      return;
    }
    Rounded<M> x;
    for (int m = 0; m < M; ++m) {
      x.x[m] = (const int32_t*)(in.bytes.data() + (first + m) * in.stride);
      x.scale[m] = in.scales.data() + (first + m) * in.groups;
      x.total[m] = in.sums.data() + (first + m) * in.groups * 2;
    }
    if constexpr (in_one_pass(M)) {
      if (READS_AHEAD && bits(of.kind) < 8) return codes<M, NOBODY>(of, x, from, to, ahead, acc);
    } else {
      if (ahead.lines) return codes<M, PASSES>(of, x, from, to, ahead, acc);
    }
    codes<M, LINES>(of, x, from, to, ahead, acc);
  }

  template <int M, Asking BY>
  static void codes(const Tile& of, const Rounded<M>& x, int64_t from, int64_t to, Ahead ahead, float* acc) {
    constexpr int FEW = in_one_pass(M) || WIDE == 1 ? WIDE : 2;
    const uint8_t* w = of.data + tile_head(of.kind);
    for (int v = 0; v < VECTORS; v += FEW) {
      const Ahead mine = ahead.share(v / FEW, VECTORS / FEW, (to - from) * block_inputs(of.kind) / GROUP);
      float* sums = acc + 16 * v;
      switch (of.kind) {
        case INT8: step_codes<M, FEW, INT8, BY>(w, v, x, from, to, mine, sums); break;
        case INT4: step_codes<M, FEW, INT4, BY>(w, v, x, from, to, mine, sums); break;
        case Q8_0: step_codes<M, FEW, Q8_0, BY>(w, v, x, from, to, mine, sums); break;
        case Q4_0: step_codes<M, FEW, Q4_0, BY>(w, v, x, from, to, mine, sums); break;
        case Q4_K: step_codes<M, FEW, Q4_K, BY>(w, v, x, from, to, mine, sums); break;
        case IQ4_NL: step_codes<M, FEW, IQ4_NL, BY>(w, v, x, from, to, mine, sums); break;
        case IQ4_XS: step_codes<M, FEW, IQ4_XS, BY>(w, v, x, from, to, mine, sums); break;
        case Q4_1: step_codes<M, FEW, Q4_1, BY>(w, v, x, from, to, mine, sums); break;
        case Q5_0: step_codes<M, FEW, Q5_0, BY>(w, v, x, from, to, mine, sums); break;
        case Q5_1: step_codes<M, FEW, Q5_1, BY>(w, v, x, from, to, mine, sums); break;
        case Q5_K: step_codes<M, FEW, Q5_K, BY>(w, v, x, from, to, mine, sums); break;
        default: step_q6_k<M, FEW, BY>(w, v, x, from, to, mine, sums);
      }
    }
  }
};

}  // namespace spillway
