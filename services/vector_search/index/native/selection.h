// The k least of a stream of distances, each known by its number in the stream; among equal ones the lower number.
//
// Three selectors with one shape, `take` any number of blocks and then `finish`: `Reservoir` and `Heap` are exact, and
// `Queues` is the approximate hierarchical priority queue of Chameleon (section 4.4.2.2). A distance that is infinite or
// not a number is no candidate, which is how a row is left out. A selector serves one query.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace spillway {

// A candidate as one word: its distance in an order that integers have, then its number.
using Key = uint64_t;

constexpr int64_t kLanes = 16;

inline Key key_of(float distance, uint32_t number) {
  const float whole = distance + 0.0f;  // one zero, not two
  uint32_t bits;
  std::memcpy(&bits, &whole, 4);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return Key(bits) << 32 | number;
}

inline float distance_of(Key key) {
  uint32_t bits = uint32_t(key >> 32);
  bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
  float distance;
  std::memcpy(&distance, &bits, 4);
  return distance;
}

inline uint32_t number_of(Key key) { return uint32_t(key); }

inline __mmask16 lanes_of(int64_t left, int64_t lanes = kLanes) {
  return __mmask16((1u << std::min(left, lanes)) - 1);
}

inline __m512i numbers_from(uint32_t first) {
  return _mm512_add_epi32(_mm512_set1_epi32(int(first)),
                          _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
}

// Leaves the k least of `size` keys in front, in order; returns how many these are.
inline int64_t keep_least(Key* keys, int64_t size, int64_t k) {
  const int64_t kept = std::min(k, size);
  if (kept < size) std::nth_element(keys, keys + kept - 1, keys + size);
  std::sort(keys, keys + kept);
  return kept;
}

// Exact: gathers what lies below a bound, and lowers the bound to the k-th least whenever its memory is full.
class Reservoir {
 public:
  explicit Reservoir(int64_t k) : k_(k), most_(2 * k + 4 * kLanes), keys_(size_t(most_ + kLanes)) {}

  void take(const float* distances, uint32_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const __mmask16 in = lanes_of(count - i);
      const __m512 x = _mm512_maskz_loadu_ps(in, distances + i);
      const __mmask16 below = _mm512_mask_cmp_ps_mask(in, x, _mm512_set1_ps(bound_), _CMP_LT_OQ);
      if (below) put(x, numbers_from(first + uint32_t(i)), below);
    }
  }

  // Writes at most k keys, the least first; returns how many.
  int64_t finish(Key* best) {
    size_ = keep_least(keys_.data(), size_, k_);
    std::copy_n(keys_.data(), size_, best);
    return size_;
  }

 private:
  void put(__m512 x, __m512i numbers, __mmask16 below) {
    // Compressed in registers: a compressing store is slow on some processors.
    const __m512i bits = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
    const __m512i flips = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(int(0x80000000u)));
    const __m512i order = _mm512_maskz_compress_epi32(below, _mm512_xor_si512(bits, flips));
    const __m512i compressed = _mm512_maskz_compress_epi32(below, numbers);
    Key* to = keys_.data() + size_;
    _mm512_storeu_si512(to, joined(_mm512_castsi512_si256(order), _mm512_castsi512_si256(compressed)));
    _mm512_storeu_si512(to + 8, joined(_mm512_extracti64x4_epi64(order, 1), _mm512_extracti64x4_epi64(compressed, 1)));
    size_ += __builtin_popcount(below);
    if (size_ <= most_ - kLanes) return;
    std::nth_element(keys_.data(), keys_.data() + k_ - 1, keys_.data() + size_);
    size_ = k_;
    bound_ = distance_of(keys_[size_t(k_ - 1)]);
  }

  static __m512i joined(__m256i order, __m256i numbers) {
    return _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(order), 32), _mm512_cvtepu32_epi64(numbers));
  }

  int64_t k_, most_, size_ = 0;
  float bound_ = std::numeric_limits<float>::infinity();
  std::vector<Key> keys_;
};

// Exact: a heap of the k least so far, whose greatest is the bound.
class Heap {
 public:
  explicit Heap(int64_t k) : k_(k) { keys_.reserve(size_t(k)); }

  void take(const float* distances, uint32_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const __mmask16 in = lanes_of(count - i);
      const __m512 x = _mm512_maskz_loadu_ps(in, distances + i);
      uint32_t below = _mm512_mask_cmp_ps_mask(in, x, _mm512_set1_ps(bound_), _CMP_LT_OQ);
      for (; below; below &= below - 1) {
        const int64_t at = i + __builtin_ctz(below);
        if (distances[at] < bound_) put(key_of(distances[at], first + uint32_t(at)));
      }
    }
  }

  int64_t finish(Key* best) {
    std::sort(keys_.begin(), keys_.end());
    std::copy(keys_.begin(), keys_.end(), best);
    return int64_t(keys_.size());
  }

 private:
  void put(Key key) {
    if (int64_t(keys_.size()) == k_) {
      std::pop_heap(keys_.begin(), keys_.end());
      keys_.back() = key;
    } else {
      keys_.push_back(key);
    }
    std::push_heap(keys_.begin(), keys_.end());
    if (int64_t(keys_.size()) == k_) bound_ = distance_of(keys_.front());
  }

  int64_t k_;
  float bound_ = std::numeric_limits<float>::infinity();
  std::vector<Key> keys_;
};

// Approximate: candidate i goes to queue i mod `queues`, which keeps its `length` least, and the k least of all queues
// are the answer. A lane of a vector is a queue, so one compare asks sixteen of them. `queues` is a power of two.
class Queues {
 public:
  Queues(int64_t k, int64_t queues, int64_t length)
      : k_(k), lanes_(std::min(queues, kLanes)), groups_(std::max<int64_t>(queues / kLanes, 1)), length_(length),
        distances_(size_t(groups_ * length * kLanes), std::numeric_limits<float>::infinity()),
        numbers_(distances_.size()), keys_(distances_.size()) {}

  // All blocks but the last hold a multiple of `queues` candidates.
  void take(const float* distances, uint32_t first, int64_t count) {
    int64_t group = 0;
    for (int64_t i = 0; i < count; i += lanes_, group = group + 1 == groups_ ? 0 : group + 1) {
      const __mmask16 in = lanes_of(count - i, lanes_);
      const __m512 x = _mm512_maskz_loadu_ps(in, distances + i);
      const float* worst = distances_.data() + ((group + 1) * length_ - 1) * kLanes;
      const __mmask16 below = _mm512_mask_cmp_ps_mask(in, x, _mm512_loadu_ps(worst), _CMP_LT_OQ);
      if (below) put(group, x, numbers_from(first + uint32_t(i)), below);
    }
  }

  int64_t finish(Key* best) {
    int64_t size = 0;
    for (size_t i = 0; i < distances_.size(); ++i) {
      keys_[size_t(size)] = key_of(distances_[i], numbers_[i]);
      size += distances_[i] < std::numeric_limits<float>::infinity();
    }
    size = keep_least(keys_.data(), size, k_);
    std::copy_n(keys_.data(), size, best);
    return size;
  }

 private:
  // Moves what is greater one place down in every lane of `below`, and puts the new candidates before it.
  void put(int64_t group, __m512 x, __m512i number, __mmask16 below) {
    float* distances = distances_.data() + group * length_ * kLanes;
    uint32_t* numbers = numbers_.data() + group * length_ * kLanes;
    int64_t at = (length_ - 1) * kLanes;
    __m512 old = _mm512_loadu_ps(distances + at);
    for (; at > 0 && below; at -= kLanes) {
      const __m512 above = _mm512_loadu_ps(distances + at - kLanes);
      const __mmask16 further = _mm512_mask_cmp_ps_mask(below, x, above, _CMP_LT_OQ);
      const __m512i moved = _mm512_mask_loadu_epi32(number, further, numbers + at - kLanes);
      const __m512i kept = _mm512_loadu_si512(numbers + at);
      _mm512_storeu_ps(distances + at, _mm512_mask_mov_ps(old, below, _mm512_mask_mov_ps(x, further, above)));
      _mm512_storeu_si512(numbers + at, _mm512_mask_mov_epi32(kept, below, moved));
      old = above;
      below = further;
    }
    if (!below) return;
    _mm512_storeu_ps(distances, _mm512_mask_mov_ps(old, below, x));
    _mm512_storeu_si512(numbers, _mm512_mask_mov_epi32(_mm512_loadu_si512(numbers), below, number));
  }

  int64_t k_, lanes_, groups_, length_;
  std::vector<float> distances_;  // group, place from the least, lane
  std::vector<uint32_t> numbers_;
  std::vector<Key> keys_;
};

}  // namespace spillway
