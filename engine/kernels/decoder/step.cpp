// One step of a decoder on the CPU, all layers in one call: what Python hands over are rows, positions and page tables.
//
// Sums and what runs between the linears are fp32; inputs of linears, keys, values and queries are rounded to what the
// weights or the pages are. Every row's result is independent of the batch, of chunking and of where its pages lie.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "own_processors.h"
#include "rows.h"

using namespace spillway;

namespace {

enum { QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3, HEAD = 4, TABLE = 5 };
enum { BEFORE_ATTENTION = 0, AFTER_ATTENTION = 1, BEFORE_MLP = 2, AFTER_MLP = 3, Q_NORM = 4, K_NORM = 5, LAST = 6 };
enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

// Norms that it does not have are empty; those of queries and keys are of a head, or of all heads together.
struct Layer {
  std::vector<float> norms[LAST];
  Linear qkv, out, gate_up, down;
  bool in_turns = true;  // a tile of gate_up holds 32 gates and, after them, what they let through; else all gates first
  int64_t group = 0, at = 0, rotation = -1;  // -1: queries and keys are not rotated
};

// A rotation of heads: by position * frequency, for two dims each; cosines and sines are scaled. Rows of texts longer
// than the model's short context have frequencies of their own (LongRoPE); of other models they are the same.
struct Rotation {
  std::vector<float> frequencies, long_frequencies;
  float scale;
};

// What a model is beside its layers. Words' vectors, what attention and MLP add to a row, and logits are scaled; with a
// cap c above 0 a logit x is c * tanh(x / c) then.
struct Shape {
  Heads heads;
  int64_t layers, hidden, inner, activation;
  float epsilon, embed_scale, residual_scale, logit_scale, logit_cap;
};

inline F activate(F x, Activation kind) {
  if (kind == SILU) return x / (splat(1.0f) + exponential(-x));
  if (kind == GELU_TANH)
    return splat(0.5f) * x * (splat(1.0f) + tanh(splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x)));
  F y;
  for (int i = 0; i < 16; ++i) y.set(i, 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f)));
  return y;
}

// to = from / rms(from) * weight; sums go in the order of the row.
inline void normalise(const float* from, const float* weight, float* to, int64_t size, float epsilon) {
  F squares = F{};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) squares = fma(load<F>(from + i), load<F>(from + i), squares);
  float total = sum(squares);
  for (; i < size; ++i) total += from[i] * from[i];
  const float inverse = 1.0f / std::sqrt(total / float(size) + epsilon);
  for (i = 0; i < size; ++i) to[i] = from[i] * inverse * weight[i];
}

// A step's memory, kept from step to step. Steps in flight at once have one each.
struct Work {
  Input input;
  std::vector<float> joined, queries, attended, gated, activated, added, rotated, states, scores;
  std::vector<Attention> attentions;
};

struct Model : Shape {
  const void* table = nullptr;  // (vocabulary, hidden), fp32 or bf16; without it, words' vectors are weights of `words`
  bool table_half = false;
  bool gates_apart = false;  // in some layer
  std::vector<Layer> layers;
  std::vector<Rotation> rotations;
  std::vector<float> last;
  Arena weights;  // of all linears
  Linear head, table_packed;
  Work work;  // of steps in one call

  const Linear& words() const { return table_packed.tiles.empty() ? head : table_packed; }

  int64_t wide() const { return (heads.heads + 2 * heads.kv_heads) * heads.dim; }
  // Cosines and sines of a row, in the order of rotations.
  int64_t turns() const {
    int64_t total = 0;
    for (const Rotation& r : rotations) total += 2 * r.frequencies.size();
    return total;
  }
  int64_t padded_inner() const { return up(inner, TILE / 2); }
};

struct Scratch {
  std::vector<float> row, tile;
  float* of(int64_t size) {
    if (int64_t(row.size()) < size) row.resize(size);
    return row.data();
  }
  float* tile_of(int64_t rows) {
    if (int64_t(tile.size()) < rows * TILE) tile.resize(rows * TILE);
    return tile.data();
  }
};
thread_local Scratch scratch;

constexpr int64_t FEW = 8192;  // inputs of all rows
thread_local Input own;

// Every tile of a linear for all rows; `end(tile, sums)` takes the sums. Few rows wait for memory, which reads faster what
// lies together: a thread that is free takes an even share of what is left, of two threads half.
template <class End>
void multiply(const Linear& linear, const Input& in, int64_t rows, End end) {
  float* acc = scratch.tile_of(rows);
  const auto tile = [&](int64_t t) {
    linear.tile(t, in, rows, acc);
    end(t, acc);
  };
  const auto tiles = int64_t(linear.tiles.size());
  if (rows <= FEW_ROWS) {
#pragma omp for schedule(guided, 1)
    for (int64_t t = 0; t < tiles; ++t) tile(t);
  } else {
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < tiles; ++t) tile(t);
  }
}

void multiply_into(const Linear& linear, const Input& in, int64_t rows, float* out) {
  multiply(linear, in, rows, [&](int64_t t, const float* acc) {
    const auto [kind, first, n, data] = linear.tiles[t];
    for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * linear.outputs + first, acc + r * TILE, n * 4);
  });
}

void multiply_onto(const Linear& linear, const Input& in, int64_t rows, float scale, float* out) {
  multiply(linear, in, rows, [&](int64_t t, const float* acc) {
    const auto [kind, first, n, data] = linear.tiles[t];
    for (int64_t r = 0; r < rows; ++r) {
      float* to = out + r * linear.outputs + first;
      for (int64_t i = 0; i < n; ++i) to[i] += acc[r * TILE + i] * scale;
    }
  });
}

// Rows as a linear takes them; `put(input, row)` rounds one. Few are rounded by each thread for itself, which is less
// than waiting for the others; for more, threads share the rows and then wait.
template <class Put>
const Input& inputs_of(Work& w, int forms, int64_t count, int64_t inputs, Put put) {
  if (count * inputs <= FEW) {
    own.shape(forms, count, inputs);
    for (int64_t r = 0; r < count; ++r) put(own, r);
    return own;
  }
#pragma omp single
  w.input.shape(forms, count, inputs);
#pragma omp for schedule(static)
  for (int64_t r = 0; r < count; ++r) put(w.input, r);
  return w.input;
}

const Input& plain_inputs(Work& w, const float* rows, int64_t count, int64_t inputs, int64_t stride, int forms) {
  return inputs_of(w, forms, count, inputs, [&](Input& in, int64_t r) {
    float* row = scratch.of(up(inputs, GROUP));
    std::memcpy(row, rows + r * stride, inputs * 4);
    in.put(r, row, inputs);
  });
}

// Rows with their norm; as they are where there is none.
const Input& norm_inputs(const Model& m, Work& w, const float* rows, int64_t count, const std::vector<float>& weight,
                         int forms) {
  if (weight.empty()) return plain_inputs(w, rows, count, m.hidden, m.hidden, forms);
  return inputs_of(w, forms, count, m.hidden, [&](Input& in, int64_t r) {
    float* row = scratch.of(up(m.hidden, GROUP));
    normalise(rows + r * m.hidden, weight.data(), row, m.hidden, m.epsilon);
    in.put(r, row, m.hidden);
  });
}

// Add to `states` what a linear makes of rows: normed first, where there is a norm.
void add_to_states(const Model& m, Work& w, const Linear& linear, const Input& in, int64_t rows,
                   const std::vector<float>& norm, float* states) {
  if (norm.empty()) return multiply_onto(linear, in, rows, m.residual_scale, states);
  multiply_into(linear, in, rows, w.added.data());
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scratch.of(m.hidden);
    normalise(w.added.data() + r * m.hidden, norm.data(), row, m.hidden, m.epsilon);
    for (int64_t i = 0; i < m.hidden; ++i) states[r * m.hidden + i] += row[i] * m.residual_scale;
  }
}

// Cosines, then sines, of a position's angles, for one rotation after another; `far`: in a long text.
void rope(const Model& m, int64_t position, bool far, float* to) {
  for (const Rotation& r : m.rotations) {
    const int64_t half = r.frequencies.size();
    const float* frequencies = (far ? r.long_frequencies : r.frequencies).data();
    for (int64_t d = 0; d < half; ++d) {
      const float angle = float(position) * frequencies[d];
      to[d] = std::cos(angle) * r.scale;
      to[d + half] = std::sin(angle) * r.scale;
    }
    to += 2 * half;
  }
}

// Norm `count` heads in place, each by itself or all together.
void norm_heads(const Model& m, const std::vector<float>& norm, int64_t count, float* heads) {
  if (norm.empty()) return;
  const int64_t size = norm.size();
  for (float* at = heads; at < heads + count * m.heads.dim; at += size) normalise(at, norm.data(), at, size, m.epsilon);
}

// Queries and keys of one row, in place: norms, rotation. `turns` are its cosines and sines, of all rotations.
void rotate(const Model& m, const Layer& layer, float* joined, const float* turns) {
  const int64_t dim = m.heads.dim;
  norm_heads(m, layer.norms[Q_NORM], m.heads.heads, joined);
  norm_heads(m, layer.norms[K_NORM], m.heads.kv_heads, joined + m.heads.heads * dim);
  if (layer.rotation < 0) return;
  for (int64_t r = 0; r < layer.rotation; ++r) turns += 2 * m.rotations[r].frequencies.size();
  const int64_t half = m.rotations[layer.rotation].frequencies.size();
  const float *c = turns, *s = c + half;
  float* rotated = scratch.of(2 * half);
  for (int64_t h = 0; h < m.heads.heads + m.heads.kv_heads; ++h) {
    float* head = joined + h * dim;
    for (int64_t d = 0; d < half; ++d) {
      rotated[d] = head[d] * c[d] - head[d + half] * s[d];
      rotated[d + half] = head[d + half] * c[d] + head[d] * s[d];
    }
    std::memcpy(head, rotated, 2 * half * 4);
  }
}

// Wait until the pages that a layer reads have been copied to the device.
void await_pages(const int64_t* pages_ready, int64_t layer) {
  // Asleep: the thread that copies may have no other core.
  while (pages_ready && __atomic_load_n(pages_ready, __ATOMIC_ACQUIRE) <= layer)
    std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// Queries, keys and values (rows, wide) of a layer: what lies before its attention.
void before_attention(const Model& m, Work& w, const Layer& layer, int64_t rows, const float* states, float* joined) {
  const Input& before = norm_inputs(m, w, states, rows, layer.norms[BEFORE_ATTENTION], layer.qkv.forms);
  multiply_into(layer.qkv, before, rows, joined);
#pragma omp for schedule(static) nowait  // a thread attends with the rows that it has rotated
  for (int64_t r = 0; r < rows; ++r) rotate(m, layer, joined + r * m.wide(), w.rotated.data() + r * m.turns());
}

// Add to `states` what follows a layer's attention.
void after_attention(const Model& m, Work& w, const Layer& layer, int64_t rows, const float* attended, float* states) {
  const int64_t wide = m.heads.heads * m.heads.dim;
  const Input& in = plain_inputs(w, attended, rows, wide, wide, layer.out.forms);
  add_to_states(m, w, layer.out, in, rows, layer.norms[AFTER_ATTENTION], states);
  const Input& after = norm_inputs(m, w, states, rows, layer.norms[BEFORE_MLP], layer.gate_up.forms);
  const int64_t inner = m.padded_inner();
  const auto gate = [&](int64_t r, int64_t at, const float* gates, const float* passed) {
    store(w.activated.data() + r * inner + at, activate(load<F>(gates), Activation(m.activation)) * load<F>(passed));
  };
  if (layer.in_turns) {
    multiply(layer.gate_up, after, rows, [&](int64_t t, const float* acc) {
      for (int64_t r = 0; r < rows; ++r)
        for (int i = 0; i < TILE / 2; i += 16)
          gate(r, t * TILE / 2 + i, acc + r * TILE + i, acc + r * TILE + TILE / 2 + i);
    });
  } else {
    multiply_into(layer.gate_up, after, rows, w.gated.data());
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const float* gates = w.gated.data() + r * 2 * m.inner;
      for (int64_t i = 0; i < m.inner; i += 16) gate(r, i, gates + i, gates + m.inner + i);
    }
  }
  const Input& activated = plain_inputs(w, w.activated.data(), rows, m.inner, inner, layer.down.forms);
  add_to_states(m, w, layer.down, activated, rows, layer.norms[AFTER_MLP], states);
}

// Write rows' keys and values to their pages, in layer `at` of the pages' group, and lay out their queries.
void write_rows(const Heads& of, const Pages& pages, int64_t at, int64_t rows, const int64_t* positions,
                const int64_t* sequences, const float* joined, float* queries) {
  const int64_t wide = (of.heads + 2 * of.kv_heads) * of.dim;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t page = pages.tables[pages.starts[sequences[r]] + positions[r] / PAGE];
    append(pages, of, at, page, positions[r] % PAGE, joined + r * wide);
    pad_queries(of, pages.kind, joined + r * wide, queries + r * of.heads * of.width());
  }
}

// Write rows' keys and values to their pages and attend with their queries, in layer `at` of the pages' group.
void attend_rows(const Heads& of, const Pages& pages, int64_t at, Attention& attention, int64_t rows,
                 const int64_t* positions, const int64_t* sequences, const float* joined, float* queries, float* out,
                 const int64_t* pages_ready, int64_t layer) {
  write_rows(of, pages, at, rows, positions, sequences, joined, queries);
  await_pages(pages_ready, layer);
  attention.run(of, pages, at, queries, positions, out);
}

// True if no number is infinite or NaN.
bool finite(const float* from, int64_t count) {
  constexpr int32_t EXPONENT = 0x7f800000;
  const auto* bits = (const int32_t*)from;
  int32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= (bits[i] & EXPONENT) == EXPONENT;
  return !bad;
}

// The index of the largest number, the first among equals.
int64_t likeliest(const float* from, int64_t count) {
  F most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) most = max(most, load<F>(from + i));
  float best = -INFINITY;
  for (int k = 0; k < 16; ++k) best = std::max(best, most[k]);
  for (; i < count; ++i) best = std::max(best, from[i]);
  for (i = 0; i < count && from[i] != best; ++i) {
  }
  return std::min(i, count - 1);
}

// Scale and cap some logits, no more than 16.
void scale_logits(const Model& m, float* logits, int64_t count) {
  F x = some<F>(logits, count) * splat(m.logit_scale);
  if (m.logit_cap > 0) x = capped(x, m.logit_cap);
  std::memcpy(logits, &x, count * 4);
}

template <class T>
void grow(std::vector<T>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
}

// Begin a step: words' vectors, and the rotations of their positions. `far` says which rows are those of long texts.
void embed(const Model& m, Work& w, int64_t rows, const int64_t* tokens, const int64_t* positions, const uint8_t* far,
           float* states) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    rope(m, positions[r], far && far[r], w.rotated.data() + r * m.turns());
    float* to = states + r * m.hidden;
    if (!m.table) m.words().weights(tokens[r], to);
    for (int64_t i = 0; i < m.hidden; ++i) {
      const int64_t at = tokens[r] * m.hidden + i;
      const float x = !m.table ? to[i] : m.table_half ? widen(((const uint16_t*)m.table)[at]) : ((const float*)m.table)[at];
      to[i] = x * m.embed_scale;
    }
  }
}

void make_room(const Model& m, Work& w, int64_t rows) {
  grow(w.activated, rows * m.padded_inner());
  if (m.gates_apart) grow(w.gated, rows * 2 * m.inner + TILE);  // the last vector may reach beyond
  grow(w.rotated, rows * m.turns());
  grow(w.added, rows * m.hidden);
}

Linear& linear_of(Model& m, int64_t layer, int which) {
  switch (which) {
    case HEAD: return m.head;
    case TABLE: return m.table_packed;
    case QKV: return m.layers[layer].qkv;
    case OUT: return m.layers[layer].out;
    case GATE_UP: return m.layers[layer].gate_up;
    default: return m.layers[layer].down;
  }
}

// Which row of gates, followed by what they let through, is an output of tiles that hold both in turns; -1: none.
int64_t in_turns(const Model& m, int64_t output) {
  const int64_t in_tile = output % TILE, at = output / TILE * TILE / 2 + in_tile % (TILE / 2);
  return at >= m.inner ? -1 : in_tile < TILE / 2 ? at : m.inner + at;
}

void set_bias(const Model& m, Linear& to, bool turns, const float* bias) {
  to.bias.assign(to.tiles.size() * TILE, 0.0f);
  for (size_t t = 0; t < to.tiles.size(); ++t)
    for (int64_t n = 0; n < to.tiles[t].count; ++n) {
      const int64_t output = to.tiles[t].first + n, row = turns ? in_turns(m, output) : output;
      if (row >= 0) to.bias[t * TILE + n] = bias[row];
    }
}

// Attention of a step whose layers are called one by one: its rows, and who computes what.
struct PlannedAttention {
  Heads of;
  int threads;
  int64_t rows;
  const int64_t* positions;
  std::vector<int64_t> owners;
  std::vector<Pages> pages;
  std::vector<Attention> attentions;
  std::vector<float> queries;
};

// A linear alone.
struct Packed {
  Arena memory;
  Linear linear;
};

}  // namespace

extern "C" {

void* spillway_model(const Shape* shape) {
  auto m = std::make_unique<Model>();
  static_cast<Shape&>(*m) = *shape;
  m->layers = std::vector<Layer>(shape->layers);
  return m.release();
}

void spillway_free(void* model) { delete (Model*)model; }

// The table of words, which must outlive the model.
void spillway_table(void* model, const void* table, int half) {
  ((Model*)model)->table = table;
  ((Model*)model)->table_half = half;
}

// A layer's place: its group, and its number in it; and its rotation, or -1.
void spillway_place(void* model, int64_t layer, int64_t group, int64_t at, int64_t rotation) {
  Layer& to = ((Model*)model)->layers[layer];
  to.group = group, to.at = at, to.rotation = rotation;
}

void spillway_norm(void* model, int64_t layer, int which, const float* weight, int64_t size) {
  Model& m = *(Model*)model;
  std::vector<float>& to = which == LAST ? m.last : m.layers[layer].norms[which];
  to.assign(weight, weight + size);
}

// Pack a matrix (outputs, inputs) of fp32 or bf16, and its bias; 1 if there is no memory for it.
int spillway_linear(void* model, int64_t layer, int which, int kind, const void* weight, int half, int64_t outputs,
                    int64_t inputs, const float* bias, int threads) {
  Model& m = *(Model*)model;
  Linear& to = linear_of(m, layer, which);
  const int64_t row_bytes = inputs * (half ? 2 : 4);
  const int64_t count = which == GATE_UP ? 2 * m.padded_inner() : outputs;
  const bool packed = to.pack(m.weights, Kind(kind), count, inputs, half, [&](int64_t output) -> const void* {
    const int64_t row = which == GATE_UP ? in_turns(m, output) : output;
    return row < 0 ? nullptr : (const uint8_t*)weight + row * row_bytes;
  }, threads);
  if (!packed) return 1;
  if (bias) set_bias(m, to, which == GATE_UP, bias);
  return 0;
}

// Pack `parts` matrices of a GGUF file, one result after the other: each (outputs, inputs) of a kind, as the file holds
// it. Gates and what they let through are packed in turns if they are of one kind. 1 if there is no memory.
int spillway_stored(void* model, int64_t layer, int which, int parts, const int* kinds, const void* const* weights,
                    const int64_t* outputs, const int64_t* row_bytes, int64_t inputs, const float* bias, int threads) {
  Model& m = *(Model*)model;
  Linear& to = linear_of(m, layer, which);
  const bool turns = which == GATE_UP && kinds[0] == kinds[1];
  if (which == GATE_UP) m.layers[layer].in_turns = turns, m.gates_apart |= !turns;
  for (int p = 0; p < (turns ? 1 : parts); ++p) {
    const int64_t count = turns ? 2 * m.padded_inner() : outputs[p];
    const bool packed = to.pack_stored(m.weights, Kind(kinds[p]), count, inputs, [&](int64_t output) -> const uint8_t* {
      const int64_t row = turns ? in_turns(m, output) : output;
      if (row < 0) return nullptr;
      return row < outputs[p] ? (const uint8_t*)weights[p] + row * row_bytes[p]
                              : (const uint8_t*)weights[p + 1] + (row - outputs[p]) * row_bytes[p + 1];
    }, threads);
    if (!packed) return 1;
  }
  if (bias) set_bias(m, to, turns, bias);
  return 0;
}

// The bytes that a model's packed weights take.
int64_t spillway_weight_bytes(void* model) {
  const Model& m = *(const Model*)model;
  int64_t total = m.head.bytes() + m.table_packed.bytes();
  for (const Layer& layer : m.layers)
    total += layer.qkv.bytes() + layer.out.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return total;
}

// Add a rotation of heads (rope), of two dims for each frequency; `far` are those of long texts.
void spillway_rope(void* model, const float* frequencies, const float* far, int64_t count, float scale) {
  ((Model*)model)->rotations.push_back({{frequencies, frequencies + count}, {far, far + count}, scale});
}

// Compute rows and write their keys and values. `groups` Pages; `ends` is the row after each sequence's last; `out` is
// (rows, hidden), before the last norm. `far` (rows) is not 0 for rows of long texts, or is null if there are none.
// `pages_ready` counts the layers whose pages have arrived, or is null if all have.
void spillway_step(void* model, int64_t rows, const int64_t* tokens, const int64_t* positions, const uint8_t* far,
                   int64_t sequences, const int64_t* ends, int64_t groups, const Pages* pages,
                   const int64_t* pages_ready, float* out, int threads) {
  Model& m = *(Model*)model;
  Work& w = m.work;
  const std::vector<int64_t> owners = owners_of(rows, ends);
  make_room(m, w, rows);
  grow(w.joined, rows * m.wide());
  grow(w.queries, rows * m.heads.heads * m.heads.width());
  grow(w.attended, rows * m.heads.heads * m.heads.dim);
  grow(w.attentions, groups);
  for (int64_t g = 0; g < groups; ++g) w.attentions[g].plan(m.heads, pages[g], positions, ends, sequences, threads);
  const OwnProcessors own(threads);
#pragma omp parallel num_threads(threads)
  {
    own.take();
    embed(m, w, rows, tokens, positions, far, out);
    for (int64_t n = 0; n < int64_t(m.layers.size()); ++n) {
      const Layer& layer = m.layers[n];
      before_attention(m, w, layer, rows, out, w.joined.data());
      attend_rows(m.heads, pages[layer.group], layer.at, w.attentions[layer.group], rows, positions, owners.data(),
                  w.joined.data(), w.queries.data(), w.attended.data(), pages_ready, n);
      after_attention(m, w, layer, rows, w.attended.data(), out);
    }
  }
}

// Memory of a step whose stages are called one by one, to be freed.
void* spillway_work() { return new Work; }

void spillway_work_free(void* work) { delete (Work*)work; }

// Begin a step of stages: `states` (rows, hidden) are filled. `far` is as in `spillway_step`.
void spillway_embed(const void* model, void* work, int64_t rows, const int64_t* tokens, const int64_t* positions,
                    const uint8_t* far, float* states, int threads) {
  const Model& m = *(const Model*)model;
  Work& w = *(Work*)work;
  make_room(m, w, rows);
#pragma omp parallel num_threads(threads)
  embed(m, w, rows, tokens, positions, far, states);
}

// The stage before a layer's attention: queries, keys and values of rows, (rows, heads + 2 kv heads, dim).
void spillway_before(const void* model, void* work, int64_t layer, int64_t rows, const float* states, float* joined,
                     int threads) {
  const Model& m = *(const Model*)model;
#pragma omp parallel num_threads(threads)
  before_attention(m, *(Work*)work, m.layers[layer], rows, states, joined);
}

// The stage after a layer's attention: `attended` is (rows, heads, dim); adds to `states`.
void spillway_after(const void* model, void* work, int64_t layer, int64_t rows, const float* attended, float* states,
                    int threads) {
  const Model& m = *(const Model*)model;
#pragma omp parallel num_threads(threads)
  after_attention(m, *(Work*)work, m.layers[layer], rows, attended, states);
}

// Work out the attention of a step once for all layers, to be freed; positions and page tables must outlive it. With
// `even`, threads take equal numbers of pages. `side` says which pages are attended to: all (0), the first `fronts` pages
// of each sequence (1), or the pages after them (2); fronts are whole chunks.
void* spillway_plan(const Heads* heads, int64_t groups, const Pages* pages, int64_t rows, const int64_t* positions,
                    int64_t sequences, const int64_t* ends, int even, int threads, int side, const int64_t* fronts) {
  auto planned = std::make_unique<PlannedAttention>();
  planned->of = *heads;
  planned->threads = threads, planned->rows = rows, planned->positions = positions;
  planned->owners = owners_of(rows, ends);
  planned->pages.assign(pages, pages + groups);
  planned->attentions.resize(groups);
  planned->queries.resize(rows * heads->heads * heads->width());
  for (int64_t g = 0; g < groups; ++g)
    planned->attentions[g].plan(planned->of, pages[g], positions, ends, sequences, threads, even, Side(side), fronts);
  return planned.release();
}

void spillway_plan_free(void* planned) { delete (PlannedAttention*)planned; }

// Write keys and values of all rows (rows, heads + 2 kv heads, dim) to their pages and attend with their queries, in one
// layer of a group; `out` is (rows, heads, dim).
void spillway_attend_planned(void* planned, int64_t group, int64_t layer, const float* joined, float* out) {
  auto& p = *(PlannedAttention*)planned;
#pragma omp parallel num_threads(p.threads)
  attend_rows(p.of, p.pages[group], layer, p.attentions[group], p.rows, p.positions, p.owners.data(), joined,
              p.queries.data(), out, nullptr, 0);
}

// Attend to the fronts with the queries in `joined` (rows, heads + 2 kv heads, dim), which writes no page: `sums`
// (rows, heads, dim) are not divided by the row sum.
void spillway_attend_front(void* planned, int64_t group, int64_t layer, const float* joined, float* sums,
                           float* row_max, float* row_sum) {
  auto& p = *(PlannedAttention*)planned;
  const Heads& of = p.of;
  const int64_t wide = (of.heads + 2 * of.kv_heads) * of.dim;
#pragma omp parallel num_threads(p.threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < p.rows; ++r)
      pad_queries(of, p.pages[group].kind, joined + r * wide, p.queries.data() + r * of.heads * of.width());
    p.attentions[group].run(of, p.pages[group], layer, p.queries.data(), p.positions, sums, row_max, row_sum);
  }
}

// Write keys and values of all rows, and attend to the pages after the fronts, chunk by chunk, without a result.
void spillway_attend_rest(void* planned, int64_t group, int64_t layer, const float* joined) {
  auto& p = *(PlannedAttention*)planned;
#pragma omp parallel num_threads(p.threads)
  {
    write_rows(p.of, p.pages[group], layer, p.rows, p.positions, p.owners.data(), joined, p.queries.data());
    p.attentions[group].chunks(p.of, p.pages[group], layer, p.queries.data(), p.positions);
  }
}

// Merge what `spillway_attend_rest` found into the attention to the fronts; `out` is (rows, heads, dim).
void spillway_attend_join(void* planned, int64_t group, const float* sums, const float* row_max, const float* row_sum,
                          float* out) {
  auto& p = *(PlannedAttention*)planned;
#pragma omp parallel num_threads(p.threads)
  p.attentions[group].join(p.of, {sums, row_max, row_sum}, out);
}

// Tell a step that may be running that the pages of the first `layers` layers have arrived.
void spillway_pages_ready(int64_t* pages_ready, int64_t layers) {
  __atomic_store_n(pages_ready, layers, __ATOMIC_RELEASE);
}

// Logits (rows, vocabulary) of rows (rows, hidden) that a step returned.
void spillway_logits(void* model, int64_t rows, const float* hidden, float* out, int threads) {
  Model& m = *(Model*)model;
#pragma omp parallel num_threads(threads)
  {
    const Input& last = norm_inputs(m, m.work, hidden, rows, m.last, m.head.forms);
    multiply_into(m.head, last, rows, out);
    if (m.logit_scale != 1 || m.logit_cap > 0) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < up(rows * m.head.outputs, 16); i += 16)
        scale_logits(m, out + i, std::min<int64_t>(16, rows * m.head.outputs - i));
    }
  }
}

// Attention alone, over some layers of one group, one after another: `q` is (rows, heads, dim) fp32, `out`
// (layers, rows, heads, dim). With `row_max` and `row_sum`, (layers, rows, heads), sums are not divided by the row sum,
// and pages may be missing: partials to be merged.
void spillway_attend(const Heads* how, const Pages* pages, int64_t layer, int64_t layers, int64_t rows, const float* q,
                     const int64_t* positions, int64_t sequences, const int64_t* ends, float* out, float* row_max,
                     float* row_sum, int threads) {
  const Heads& of = *how;
  const int64_t heads = of.heads, dim = of.dim, width = of.width();
  std::vector<float> queries(rows * heads * width);
  Attention attention;
  attention.plan(of, *pages, positions, ends, sequences, threads);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
      pad_queries(of, pages->kind, q + r * heads * dim, queries.data() + r * heads * width);
    const int64_t size = rows * heads;
    for (int64_t n = 0; n < layers; ++n)
      attention.run(of, *pages, layer + n, queries.data(), positions, out + n * size * dim,
                    row_max ? row_max + n * size : nullptr, row_sum ? row_sum + n * size : nullptr);
  }
}

// One linear alone: packed, multiplied with fp32 rows (rounded as its kind has it), dropped.
void* spillway_pack(int kind, const void* weight, int half, int64_t outputs, int64_t inputs, int threads) {
  auto packed = std::make_unique<Packed>();
  const int64_t row_bytes = inputs * (half ? 2 : 4);
  const auto row = [&](int64_t output) -> const void* { return (const uint8_t*)weight + output * row_bytes; };
  const bool done = packed->linear.pack(packed->memory, Kind(kind), outputs, inputs, half, row, threads);
  return done ? packed.release() : nullptr;
}

// The same of a matrix as a GGUF file holds it.
void* spillway_pack_stored(int kind, const void* weight, int64_t outputs, int64_t inputs, int64_t row_bytes, int threads) {
  auto packed = std::make_unique<Packed>();
  const auto row = [&](int64_t output) { return (const uint8_t*)weight + output * row_bytes; };
  const bool done = packed->linear.pack_stored(packed->memory, Kind(kind), outputs, inputs, row, threads);
  return done ? packed.release() : nullptr;
}

// The weights (outputs, inputs) that a packed linear stands for.
void spillway_unpack(const void* packed, float* to) {
  const Linear& linear = ((const Packed*)packed)->linear;
  for (int64_t o = 0; o < linear.outputs; ++o) linear.weights(o, to + o * linear.inputs);
}

void spillway_multiply(const void* packed, int64_t rows, const float* from, float* to, int threads) {
  const Linear& linear = ((const Packed*)packed)->linear;
  static thread_local Input input;  // kept: what it costs to take memory is not the linear's
  Input& in = input;
  in.shape(linear.forms, rows, linear.inputs);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      float* row = scratch.of(up(linear.inputs, GROUP));
      std::memcpy(row, from + r * linear.inputs, linear.inputs * 4);
      in.put(r, row, linear.inputs);
    }
    multiply_into(linear, in, rows, to);
  }
}

void spillway_drop(void* packed) { delete (Packed*)packed; }

// Compute a row of each sequence, and then `count` - 1 times the row of the id that the row before drew: the likeliest,
// the first among equals, of those not banned. The ids banned for the token `n` of row `r` lie in `banned` from
// starts[n * rows + r] on; `far` is as in `spillway_step`. Ends after the token at which `early` (or null) is not 0. `out` is (count, rows). Returns
// how many tokens each row drew, or -1 if a hidden state or a logit is not finite.
int64_t spillway_greedy(void* model, int64_t rows, const int64_t* tokens, const int64_t* positions,
                        const uint8_t* far, int64_t groups, const Pages* pages, const int64_t* pages_ready, int64_t count, const int64_t* starts,
                        const int64_t* banned, const int64_t* early, int64_t* out, int threads) {
  Model& m = *(Model*)model;
  const int64_t vocabulary = m.head.outputs;
  std::vector<int64_t> at(positions, positions + rows), ends(rows);
  for (int64_t r = 0; r < rows; ++r) ends[r] = r + 1;
  grow(m.work.states, rows * m.hidden);
  grow(m.work.scores, rows * vocabulary);
  for (int64_t n = 0; n < count; ++n) {
    spillway_step(model, rows, n ? out + (n - 1) * rows : tokens, at.data(), far, rows, ends.data(), groups, pages,
                  n ? nullptr : pages_ready, m.work.states.data(), threads);
    if (!finite(m.work.states.data(), rows * m.hidden)) return -1;
    spillway_logits(model, rows, m.work.states.data(), m.work.scores.data(), threads);
    bool sound = true;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : sound) if (rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = m.work.scores.data() + r * vocabulary;
      sound = sound && finite(scores, vocabulary);
      const int64_t* ids = starts + n * rows + r;
      for (int64_t b = ids[0]; b < ids[1]; ++b) scores[banned[b]] = -INFINITY;
      out[n * rows + r] = likeliest(scores, vocabulary);
    }
    if (!sound) return -1;
    for (int64_t& position : at) ++position;
    if (early && __atomic_load_n(early, __ATOMIC_RELAXED)) return n + 1;
  }
  return count;
}

// The sum of some memory, read as fast as it can be: the bandwidth that others are compared with.
float spillway_read(const float* from, int64_t count, int threads) {
  constexpr int64_t PIECE = 1 << 16;
  float total = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(+ : total)
  for (int64_t piece = 0; piece < count / PIECE; ++piece) {
    F sums[8] = {};
    const float* at = from + piece * PIECE;
    for (int64_t i = 0; i < PIECE; i += 128)
      UNROLLED(j, 8) {
        prefetch(at + i + 16 * j + 1024);
        sums[j] += load<F>(at + i + 16 * j);
      }
    for (int j = 1; j < 8; ++j) sums[0] += sums[j];
    total += sum(sums[0]);
  }
  return total;
}
}
