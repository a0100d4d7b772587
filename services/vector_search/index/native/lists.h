// Inverted lists as services/vector_search/index/inverted_lists.py lays them out, and what a search of them needs.
//
// Codes lie in blocks of 64 rows: of 8 bits, a subspace after another; of 4 bits, eight subspaces after another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "best_kept.h"

namespace {

constexpr int64_t kBlock = 64, kNibbles = 16;
enum Metric : int64_t { kDot, kCosine, kL2 };

// As inverted_lists.py lays it out. A row is about its list's centroid plus a word of each subspace, both rotated.
struct Lists {
  int64_t dimension, width, subspaces, part, lists, metric, entries;  // entries: words of a subspace, 256 or 16
  const float* rotation;   // width x dimension, null where rows are not rotated
  const float* centroids;  // lists x width
  const float* halves;     // of each centroid: half its square
  const float* words;      // subspaces x part x entries
  const int64_t* starts;   // the first block of each list, and the end
  // 8 bits: blocks x subspaces x 64, row i of a block at byte 2 i, row 32 + i at 2 i + 1. 4 bits: blocks x eights x 64 x 4,
  // byte s of a row and an eight has subspace 8 eight + s in its low half, subspace 8 eight + 4 + s in its high one.
  const uint8_t* codes;
  const int32_t* rows;     // blocks x 64, -1 where there is none
  const float* norms;      // but for dot: blocks x 64, half the square of what the code stands for
};

struct Asked {
  const float* matrix;  // the rows themselves
  const bool* keep;     // of each row: whether it may be found
  int64_t k, probes, rescored;
};

struct Scratch {
  std::vector<float> rotated, near, table;
  std::vector<uint8_t> rounded;
  std::vector<std::pair<float, int64_t>> order;
  BestKept best;
};

// Tables of the products of a query with every word, rounded to 8 bits: product = least + scale * rounded.
struct Rounding {
  float scale, least;  // `least` summed over the subspaces
};

}  // namespace
