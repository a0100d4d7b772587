// The selectors of selection.h over whole rows of distances, for services/vector_search/index/selection.py.
// Built by common/native/library.py for processors with AVX-512.
#include "selection.h"

namespace {

using spillway::Key;

// Writes a query's answer; what was not found is number -1 at an infinite distance.
void write(const std::vector<Key>& best, int64_t found, int64_t k, int64_t* numbers, float* distances) {
  for (int64_t i = 0; i < k; ++i) {
    const bool there = i < found;
    numbers[i] = there ? int64_t(spillway::number_of(best[size_t(i)])) : -1;
    distances[i] = there ? spillway::distance_of(best[size_t(i)]) : std::numeric_limits<float>::infinity();
  }
}

template <typename Make>
void each(const float* x, int64_t queries, int64_t count, int64_t k, int64_t* numbers, float* distances,
          const Make& make) {
  std::vector<Key> best(static_cast<size_t>(k));
  for (int64_t i = 0; i < queries; ++i) {
    auto selector = make();
    selector.take(x + i * count, 0, count);
    write(best, selector.finish(best.data()), k, numbers + i * k, distances + i * k);
  }
}

}  // namespace

// Selects of each row of `count` distances the k least. `length` 0 is exact: by a heap with `queues` 0, else by a
// reservoir; any other `length` is that of `queues` queues, a power of two up to 64.
extern "C" void spillway_select(const float* x, int64_t queries, int64_t count, int64_t k, int64_t queues,
                                int64_t length, int64_t* numbers, float* distances) {
  if (length > 0)
    each(x, queries, count, k, numbers, distances, [&] { return spillway::Queues(k, queues, length); });
  else if (queues > 0)
    each(x, queries, count, k, numbers, distances, [&] { return spillway::Reservoir(k); });
  else
    each(x, queries, count, k, numbers, distances, [&] { return spillway::Heap(k); });
}
