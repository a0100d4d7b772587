// Rows of a step on their way into attention: keys and values go to their pages, queries become what attention reads.
#pragma once
#include <vector>

#include "attention.h"

namespace spillway {

// Write a token's key (half 0) or value of one head to its place in a page, rounded by `as`. Numbers are rounded side by
// side and then spread, so that only the spreading goes one by one.
template <class T, class As>
inline void write(T* pages, int64_t block, int64_t offset, int64_t half, int64_t dim, int64_t unit, const float* row, As as) {
  T rounded[WIDEST];
  for (int64_t d = 0; d < dim; ++d) rounded[d] = as(row[d]);
  T* to = pages + block * PAGE * dim;
  if (half) {
    to += offset / unit * unit * dim + offset % unit;
    for (int64_t d = 0; d < dim; ++d) to[d * unit] = rounded[d];
  } else {
    to += offset * unit;
    for (int64_t d = 0; d < dim; d += unit) std::memcpy(to + d * PAGE, rounded + d, unit * sizeof(T));
  }
}

inline void write(const Pages& pages, const Heads& of, int64_t layer, int32_t page, int64_t offset, int64_t half, int64_t head,
           const float* row) {
  const int64_t block = ((page * pages.layers + layer) * 2 + half) * of.kv_heads + head;
  if (pages.kind == FP32)
    write((float*)pages.data, block, offset, half, of.dim, 1, row, [](float x) { return x; });
  else if (pages.kind == BF16)
    write((uint16_t*)pages.data, block, offset, half, of.dim, 2, row, [](float x) { return narrow(x); });
  else
    write((uint16_t*)pages.data, block, offset, half, of.dim, 1, row, [](float x) { return narrow16(x); });
}

// Write a row's keys and values, which follow its queries in `joined`, to their page.
inline void append(const Pages& pages, const Heads& of, int64_t layer, int32_t page, int64_t offset, const float* joined) {
  for (int64_t h = 0; h < of.kv_heads; ++h)
    for (int64_t half = 0; half < 2; ++half)
      write(pages, of, layer, page, offset, half, h, joined + (of.heads + half * of.kv_heads + h) * of.dim);
}

// A row's queries as attention reads them: padded, and rounded to what the pages are.
inline void pad_queries(const Heads& of, Kind kind, const float* joined, float* queries) {
  const int64_t width = of.width();
  alignas(64) float row[WIDEST];
  for (int64_t h = 0; h < of.heads; ++h, queries += width) {
    std::fill(row + of.dim, row + width, 0.0f);
    std::memcpy(row, joined + h * of.dim, of.dim * 4);
    if (kind == BF16)
      for (int64_t d = 0; d < width; d += 16) store((uint16_t*)queries + d, narrow(load<F>(row + d)));
    else
      std::memcpy(queries, row, width * 4);
  }
}

// The sequence of every row.
inline std::vector<int64_t> owners_of(int64_t rows, const int64_t* ends) {
  std::vector<int64_t> owners(rows);
  for (int64_t r = 0, s = 0; r < rows; ++r) {
    while (r >= ends[s]) ++s;
    owners[r] = s;
  }
  return owners;
}

}  // namespace spillway
