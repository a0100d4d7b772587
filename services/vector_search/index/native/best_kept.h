// The selection of a scan: of the candidates that are offered to it, the best so many. Exact.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

struct Scored {
  float score;
  int32_t row;
};

// Holds up to twice as many as are asked for and forgets the worse half when it is full, so that keeping one costs a
// few instructions on average.
class BestKept {
 public:
  // Only scores above this are worth an offer.
  float least = -INFINITY;

  void begin(size_t count) {
    kept_ = count;
    held_.clear();
    held_.reserve(2 * count + 64);
    least = -INFINITY;
  }

  void offer(float score, int32_t row) {
    held_.push_back({score, row});
    if (held_.size() >= 2 * kept_ + 64) cut();
  }

  // The best, in no order.
  std::vector<Scored>& finish() {
    if (held_.size() > kept_) cut();
    return held_;
  }

 private:
  void cut() {
    std::nth_element(held_.begin(), held_.begin() + ptrdiff_t(kept_) - 1, held_.end(),
                     [](const Scored& a, const Scored& b) { return a.score > b.score; });
    held_.resize(kept_);
    least = held_[kept_ - 1].score;
  }

  size_t kept_ = 0;
  std::vector<Scored> held_;
};
