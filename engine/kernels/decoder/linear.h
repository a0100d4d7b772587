// Linears over a few or many rows. A row of the result is added up along the inputs in one order (in fp32 by stretches),
// whatever rows are computed beside it: its bits never depend on the batch.
//
// Weights are packed into tiles of 64 outputs, read front to back once a step:
//   fp32 [input][64]; bf16 [pair of inputs][64][2]; bytes and nibbles in groups of 32 inputs, [scale, bf16][64] and then
//   [4 inputs][64][4], or [8 inputs][64][4 bytes], of which the low nibbles are the first four inputs.
// Bytes and nibbles are unsigned (128 or 8 is zero); the inputs are then rounded to signed bytes, with a scale a group.
#pragma once
#include <cstdlib>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "vectors.h"

namespace spillway {

enum Kind { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, FP16 = 4 };

constexpr int TILE = 64, GROUP = 32, VECTORS = TILE / 16;
#if defined(__AVX512F__)
constexpr int WIDE = 4, ROWS = 6;  // vectors of outputs and rows whose sums stay in registers
#else
constexpr int WIDE = 1, ROWS = 4;
#endif
constexpr int64_t PART_BYTES = 320 << 10;  // of a tile, what stays in the second cache while rows pass

inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Memory in huge pages where the system has them: weights are read once a step, front to back.
inline void* reserve(size_t bytes) {
  void* memory = std::aligned_alloc(2 << 20, up(bytes, 2 << 20));
#if defined(__linux__)
  if (memory) madvise(memory, up(bytes, 2 << 20), MADV_HUGEPAGE);
#endif
  return memory;
}

// Rows as a linear of some kind takes them.
struct Input {
  Kind kind = FP32;
  int64_t stride = 0, groups = 0;  // bytes a row; groups a row
  std::vector<uint8_t> data;
  std::vector<float> scales;
  std::vector<int32_t> sums;  // of the rounded inputs of a group

  void shape(Kind as, int64_t rows, int64_t inputs) {
    kind = as;
    groups = up(inputs, GROUP) / GROUP;
    stride = groups * GROUP * (as == FP32 ? 4 : as == BF16 ? 2 : 1);
    if (int64_t(data.size()) < rows * stride) data.resize(rows * stride);
    if (as != FP32 && as != BF16 && int64_t(scales.size()) < rows * groups) {
      scales.resize(rows * groups);
      sums.resize(rows * groups);
    }
  }
  // Round one row; `from` has room up to a multiple of GROUP, which is set to 0 here.
  void put(int64_t row, float* from, int64_t inputs) {
    uint8_t* to = data.data() + row * stride;
    for (int64_t i = inputs; i < groups * GROUP; ++i) from[i] = 0;
    if (kind == FP32) {
      std::memcpy(to, from, groups * GROUP * 4);
    } else if (kind == BF16) {
      for (int64_t i = 0; i < groups * GROUP; i += 16) store(to + 2 * i, narrow(load<F>(from + i)));
    } else {
      for (int64_t g = 0; g < groups; ++g) bytes(row, g, from + g * GROUP, (int8_t*)to + g * GROUP);
    }
  }

 private:
  void bytes(int64_t row, int64_t g, const float* from, int8_t* to) {
    F most = F{};
    for (int i = 0; i < GROUP; i += 16) {
      const F x = load<F>(from + i);
      most = max(most, max(x, -x));
    }
    const float scale = largest(most) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < GROUP; ++i) {
      to[i] = int8_t(std::nearbyint(from[i] * inverse));
      total += to[i];
    }
    scales[row * groups + g] = scale;
    sums[row * groups + g] = total;
  }
};

// The sums of M rows and V vectors of outputs over the inputs [from, to), added to those in `acc` (rows of TILE). In
// fp32 every 32 inputs have a sum of their own, so that rounding does not add up along many.
constexpr int64_t STRETCH = 32;
template <int M, int V>
inline void step_fp32(const float* w, const float* const* x, int64_t from, int64_t to, float* acc) {
  for (int64_t first = from; first < to; first += STRETCH) {
    F s[M][V] = {};
    for (int64_t k = first; k < first + STRETCH; ++k) {
      F b[V];
      for (int v = 0; v < V; ++v) {
        b[v] = load<F>(w + k * TILE + 16 * v);
        prefetch(w + k * TILE + 16 * v + 16 * TILE);
      }
      for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) s[m][v] = fma(splat(x[m][k]), b[v], s[m][v]);
    }
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v) store(acc + m * TILE + 16 * v, load<F>(acc + m * TILE + 16 * v) + s[m][v]);
  }
}

template <int M, int V>
inline void step_bf16(const int32_t* w, const int32_t* const* x, int64_t from, int64_t to, float* acc) {
  F s[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) s[m][v] = load<F>(acc + m * TILE + 16 * v);
  for (int64_t k = from; k < to; ++k) {
    I b[V];
    for (int v = 0; v < V; ++v) {
      b[v] = load<I>(w + k * TILE + 16 * v);
      prefetch(w + k * TILE + 16 * v + 16 * TILE);
    }
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v) s[m][v] = dot_pairs(s[m][v], b[v], splat(x[m][k]));
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(acc + m * TILE + 16 * v, s[m][v]);
}

// `first` is the first of the V vectors in its tile `w`; `acc` begins at it.
template <int M, int V, bool NIBBLES>
inline void step_bytes(const uint8_t* w, int first, const int32_t* const* x, const float* const* scale,
                       const int32_t* const* total, int64_t from, int64_t to, float* acc) {
  constexpr int64_t BYTES = TILE * 2 + TILE * GROUP / (NIBBLES ? 2 : 1);
  constexpr int32_t ZERO = NIBBLES ? 8 : 128;
  F s[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) s[m][v] = load<F>(acc + m * TILE + 16 * v);
  for (int64_t g = from; g < to; ++g) {
    const uint8_t* at = w + g * BYTES;
    I t[M][V];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v) t[m][v] = splat(-ZERO * total[m][g]);
    const uint8_t* codes = at + TILE * 2 + 64 * first;
    for (int k = 0; k < GROUP / 4; k += NIBBLES ? 2 : 1) {
      for (int v = 0; v < V; ++v) {
        const I c = load<I>(codes + (NIBBLES ? k / 2 : k) * TILE * 4 + 64 * v);
        prefetch(codes + (NIBBLES ? k / 2 : k) * TILE * 4 + 64 * v + 4096);
        if (NIBBLES) {
          const I low = c & splat(0x0f0f0f0f), high = c >> 4 & splat(0x0f0f0f0f);
          for (int m = 0; m < M; ++m) {
            t[m][v] = dot_bytes(t[m][v], low, splat(x[m][g * GROUP / 4 + k]));
            t[m][v] = dot_bytes(t[m][v], high, splat(x[m][g * GROUP / 4 + k + 1]));
          }
        } else {
          for (int m = 0; m < M; ++m) t[m][v] = dot_bytes(t[m][v], c, splat(x[m][g * GROUP / 4 + k]));
        }
      }
    }
    for (int v = 0; v < V; ++v) {
      const F each = widen(load<H>(at + 32 * (first + v)));
      for (int m = 0; m < M; ++m) s[m][v] = fma(to_float(t[m][v]), each * splat(scale[m][g]), s[m][v]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(acc + m * TILE + 16 * v, s[m][v]);
}

struct Linear {
  Kind kind = FP32;
  int64_t outputs = 0, inputs = 0, groups = 0, tiles = 0, tile_bytes = 0, group_bytes = 0;
  uint8_t* data = nullptr;
  std::vector<float> bias;  // of whole tiles, or empty

  Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;
  ~Linear() { std::free(data); }

  // `at(output)` is where an output's row of weights begins (fp32 or bf16), or nullptr for one that is not there.
  template <class At>
  void pack(Kind as, int64_t outs, int64_t ins, bool half, At at, int threads) {
    kind = as, outputs = outs, inputs = ins;
    groups = up(ins, GROUP) / GROUP;
    tiles = up(outs, TILE) / TILE;
    group_bytes = as == FP32   ? TILE * GROUP * 4
                  : as == BF16 ? TILE * GROUP * 2
                               : TILE * 2 + TILE * GROUP / (as == INT4 ? 2 : 1);
    tile_bytes = groups * group_bytes;
    data = (uint8_t*)reserve(tiles * tile_bytes + 8192);  // prefetching goes a little beyond
    if (!data) return;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      float values[GROUP];
      for (int64_t g = 0; g < groups; ++g)
        for (int n = 0; n < TILE; ++n) {
          const void* row = tile * TILE + n < outs ? at(tile * TILE + n) : nullptr;
          for (int i = 0; i < GROUP; ++i) {
            const int64_t k = g * GROUP + i;
            values[i] = !row || k >= ins ? 0.0f : half ? widen(((const uint16_t*)row)[k]) : ((const float*)row)[k];
          }
          put(data + tile * tile_bytes + g * group_bytes, n, values);
        }
    }
  }

  // The outputs of one tile for all rows, into `acc` (rows of TILE floats).
  void tile(int64_t number, const Input& in, int64_t rows, float* acc) const {
    const uint8_t* w = data + number * tile_bytes;
    for (int64_t i = 0; i < rows * TILE; i += 16)
      store(acc + i, bias.empty() ? F{} : load<F>(bias.data() + number * TILE + i % TILE));
    const int64_t part = std::max<int64_t>(1, PART_BYTES / group_bytes);
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t g = 0; g < groups; g += part)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = b * rows / blocks, last = (b + 1) * rows / blocks;
        block(int(last - first), w, in, first, g, std::min(groups, g + part), acc + first * TILE);
      }
  }

 private:
  void put(uint8_t* to, int n, const float* values) const {
    if (kind == FP32) {
      for (int i = 0; i < GROUP; ++i) ((float*)to)[i * TILE + n] = values[i];
    } else if (kind == BF16) {
      for (int i = 0; i < GROUP; ++i) ((uint16_t*)to)[(i / 2 * TILE + n) * 2 + i % 2] = narrow(values[i]);
    } else {
      // Symmetric: the largest becomes 127 of 128, or 7 of 8 (its negative may be -8).
      float most = 0, signed_most = 0;
      for (int i = 0; i < GROUP; ++i)
        if (std::fabs(values[i]) > most) most = std::fabs(values[i]), signed_most = values[i];
      const int zero = kind == INT8 ? 128 : 8;
      const uint16_t kept = narrow(kind == INT8 ? most / 127 : signed_most / -8);
      const float scale = widen(kept);  // codes are of the scale as it is kept, so its rounding costs nothing
      ((uint16_t*)to)[n] = kept;
      uint8_t* codes = to + TILE * 2;
      for (int i = 0; i < GROUP; ++i) {
        const int code = scale == 0 ? zero : int(std::nearbyint(values[i] / scale)) + zero;
        if (kind == INT8) codes[(i / 4 * TILE + n) * 4 + i % 4] = uint8_t(code);
        else {
          uint8_t& both = codes[(i / 8 * TILE + n) * 4 + i % 4];
          const int nibble = code > 15 ? 15 : code;
          both = i % 8 < 4 ? uint8_t(nibble) : uint8_t(both | nibble << 4);
        }
      }
    }
  }

  void block(int m, const uint8_t* w, const Input& in, int64_t first, int64_t from, int64_t to, float* acc) const {
    switch (m) {
      case 1: return some<1>(w, in, first, from, to, acc);
      case 2: return some<2>(w, in, first, from, to, acc);
      case 3: return some<3>(w, in, first, from, to, acc);
      case 4: return some<4>(w, in, first, from, to, acc);
#if defined(__AVX512F__)
      case 5: return some<5>(w, in, first, from, to, acc);
      case 6: return some<6>(w, in, first, from, to, acc);
#endif
    }
  }

  template <int M>
  void some(const uint8_t* w, const Input& in, int64_t first, int64_t from, int64_t to, float* acc) const {
    const uint8_t* x[M];
    const float* scale[M];
    const int32_t* total[M];
    for (int m = 0; m < M; ++m) {
      x[m] = in.data.data() + (first + m) * in.stride;
      scale[m] = in.scales.data() + (first + m) * groups;
      total[m] = in.sums.data() + (first + m) * groups;
    }
    // Whole numbers need registers for two sums: fewer vectors at a time for many rows.
    constexpr int FEW = M > 3 && WIDE > 2 ? 2 : WIDE;
    switch (kind) {
      case FP32:
        for (int v = 0; v < VECTORS; v += WIDE)
          step_fp32<M, WIDE>((const float*)w + 16 * v, (const float* const*)x, from * GROUP, to * GROUP, acc + 16 * v);
        return;
      case BF16:
        for (int v = 0; v < VECTORS; v += WIDE)
          step_bf16<M, WIDE>((const int32_t*)w + 16 * v, (const int32_t* const*)x, from * GROUP / 2, to * GROUP / 2,
                             acc + 16 * v);
        return;
      case INT8:
        for (int v = 0; v < VECTORS; v += FEW)
          step_bytes<M, FEW, false>(w, v, (const int32_t* const*)x, scale, total, from, to, acc + 16 * v);
        return;
      default:
        for (int v = 0; v < VECTORS; v += FEW)
          step_bytes<M, FEW, true>(w, v, (const int32_t* const*)x, scale, total, from, to, acc + 16 * v);
    }
  }
};

}  // namespace spillway
