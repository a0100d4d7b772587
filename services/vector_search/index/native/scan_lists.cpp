// The scan of inverted lists: of a query's nearest lists every code is scored by tables, the best exactly by their rows.
// Built by common/native/library.py; called by services/vector_search/index/inverted_lists.py.
//
// Everything that is read here is never written to, but for the marks of live rows.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "lists.h"
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "scan_avx512.h"
#else
#include "scan_avx2.h"
#endif

namespace {

void scan(const Lists& g, const Asked& asked, int64_t list, const Rounding& rounding, float bias, Scratch& s) {
  int64_t block = g.starts[list];
  const int64_t end = g.starts[list + 1];
  for (; block + 4 <= end; block += 4) score<4>(g, asked, block, rounding, bias, s);
  for (; block < end; ++block) score<1>(g, asked, block, rounding, bias, s);
}

// Puts the nearest lists into s.order, nearest first, each with the product of query and centroid.
void nearest_lists(const Lists& g, int64_t probes, Scratch& s) {
  s.near.resize(size_t(g.lists));
  s.order.resize(size_t(g.lists));
  products(g.centroids, g.lists, g.width, s.rotated.data(), s.near.data());
  for (int64_t i = 0; i < g.lists; ++i) {
    s.order[size_t(i)] = {s.near[size_t(i)] - (g.metric == kDot ? 0.0f : g.halves[i]), i};
  }
  const auto end = s.order.begin() + ptrdiff_t(std::min(probes, g.lists));
  const auto nearer = [](const auto& a, const auto& b) { return a.first > b.first; };
  std::nth_element(s.order.begin(), end, s.order.end(), nearer);
  s.order.resize(size_t(end - s.order.begin()));
  std::sort(s.order.begin(), s.order.end(), nearer);
}

void rotate(const Lists& g, const float* q, Scratch& s) {
  s.rotated.assign(size_t(g.width), 0.0f);
  if (g.rotation) {
    products(g.rotation, g.width, g.dimension, q, s.rotated.data());
  } else {
    std::copy(q, q + g.dimension, s.rotated.begin());
  }
}

// Leaves in s.best the best of the nearest lists by their codes.
void find(const Lists& g, const Asked& asked, const float* q, Scratch& s) {
  rotate(g, q, s);
  nearest_lists(g, asked.probes, s);
  const Rounding rounding = tables(g, s);
  s.best.begin(size_t(asked.rescored));
  for (const auto& [_, list] : s.order) scan(g, asked, list, rounding, s.near[size_t(list)] + rounding.least, s);
}

// Writes at most k rows and scores, best first; returns how many.
int64_t search(const Lists& g, const Asked& asked, const float* q, int64_t* rows, float* scores, Scratch& s) {
  find(g, asked, q, s);
  std::vector<Scored>& found = s.best.finish();
  // In the order in which they lie on the disk.
  std::sort(found.begin(), found.end(), [](const Scored& a, const Scored& b) { return a.row < b.row; });
  constexpr size_t kAhead = 4;
  for (size_t i = 0; i < found.size(); ++i) {
    if (i + kAhead < found.size()) {
      const float* coming = asked.matrix + int64_t(found[i + kAhead].row) * g.dimension;
      for (int64_t d = 0; d < g.dimension; d += 16) _mm_prefetch(coming + d, _MM_HINT_T0);
    }
    const float* x = asked.matrix + int64_t(found[i].row) * g.dimension;
    found[i].score = g.metric == kL2 ? -distance(x, q, g.dimension) : dot(x, q, g.dimension);
  }
  const int64_t count = std::min(asked.k, int64_t(found.size()));
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Scored& a, const Scored& b) {
    return a.score > b.score || (a.score == b.score && a.row < b.row);
  });
  for (int64_t i = 0; i < count; ++i) scores[i] = found[size_t(i)].score, rows[i] = found[size_t(i)].row;
  return count;
}

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

}  // namespace

// Searches `count` queries; found[i] of rows[i * k ...] are written.
extern "C" void spillway_scan_lists(const Lists* lists, const float* matrix, const bool* keep, const float* queries,
                                    int64_t count, int64_t k, int64_t probes, int64_t rescored, int64_t threads,
                                    int64_t* rows, float* scores, int64_t* found) {
  const Asked asked{matrix, keep, k, probes, std::max(k, rescored)};
  share(count, threads, 8, [&](Scratch& scratch, int64_t i) {
    found[i] = search(*lists, asked, queries + i * lists->dimension, rows + i * k, scores + i * k, scratch);
  });
}

// Writes the numbers of the lists that a search of each query reads, nearest first; `probes` is at most how many there are.
extern "C" void spillway_nearest_lists(const Lists* lists, const float* queries, int64_t count, int64_t probes, int64_t* found) {
  share(count, 1, 8, [&](Scratch& scratch, int64_t i) {
    rotate(*lists, queries + i * lists->dimension, scratch);
    nearest_lists(*lists, probes, scratch);
    for (int64_t j = 0; j < probes; ++j) found[i * probes + j] = scratch.order[size_t(j)].second;
  });
}

// Writes the candidates of `count` queries and their scores by the codes, best first.
extern "C" void spillway_list_candidates(const Lists* lists, const bool* keep, const float* queries, int64_t count,
                                         int64_t k, int64_t probes, int64_t threads, int64_t* rows, float* scores,
                                         int64_t* found) {
  const Asked asked{nullptr, keep, k, probes, k};
  share(count, threads, 8, [&](Scratch& scratch, int64_t i) {
    find(*lists, asked, queries + i * lists->dimension, scratch);
    std::vector<Scored>& best = scratch.best.finish();
    std::sort(best.begin(), best.end(), [](const Scored& a, const Scored& b) { return a.score > b.score; });
    found[i] = int64_t(best.size());
    for (size_t j = 0; j < best.size(); ++j) rows[i * k + int64_t(j)] = best[j].row, scores[i * k + int64_t(j)] = best[j].score;
  });
}
