// Delayed-synchronization traversal of a graph's lowest level: several groups of candidates are evaluated at once, and
// only the oldest is waited for (Jiang's thesis, 2025, section 7.4). bench/simulation/delayed_traversal.py is the rule in plain Python.
//
// What is found, followed and visited depends on the graph, the query and the numbers of groups and candidates alone:
// which nodes a group evaluates is settled when it is launched, in order, by the one thread that keeps the best.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "futex.h"
#include "graph.h"

namespace {

constexpr uint32_t kRing = 16;  // groups in flight at most
constexpr uint32_t kBlock = 8;  // nodes that a thread scores at a time
constexpr uint32_t kTogether = 16, kHashes = 8;  // nodes that a filter hashes at once, and its hashes at most

// How a walk goes on: `groups` of `candidates` each in flight; a filter of `bits` (a power of two) with `hashes`, or 0.
struct Delay {
  int64_t groups, candidates, bits, hashes, helpers, together;
};

// Which nodes have been visited: a bit each, or a Bloom filter.
class Visited {
 public:
  void clear(int64_t slots, int64_t nodes, int64_t bits, int64_t hashes) {
    mask_ = bits > 0 ? uint32_t(bits - 1) : 0, hashes_ = uint32_t(hashes);
    words_.resize(std::max(words_.size(), size_t((bits > 0 ? bits : slots) + 63) / 64));
    std::memset(words_.data(), 0, size_t((bits > 0 ? bits : nodes) + 63) / 64 * 8);
  }

  // Adds those of `count` nodes that were not visited to `fresh`, in order; returns how many.
  size_t visit(const uint32_t* nodes, uint32_t count, uint32_t* fresh) {
    return mask_ ? visit_filter(nodes, count, fresh) : visit_bits(nodes, count, fresh);
  }

 private:
  size_t visit_bits(const uint32_t* nodes, uint32_t count, uint32_t* fresh) {
    size_t size = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t node = read(nodes + i);
      const uint64_t bit = 1ull << (node & 63);
      fresh[size] = node;
      size += (words_[node >> 6] & bit) == 0;
      words_[node >> 6] |= bit;
    }
    return size;
  }

  size_t visit_filter(const uint32_t* nodes, uint32_t count, uint32_t* fresh) {
    size_t size = 0;
    uint32_t some[kTogether] = {}, places[kHashes][kTogether];
    for (uint32_t begin = 0; begin < count; begin += kTogether) {
      const uint32_t many = std::min(kTogether, count - begin);
      for (uint32_t i = 0; i < many; ++i) some[i] = read(nodes + begin + i);
      for (uint32_t h = 0; h < hashes_; ++h)
        for (uint32_t i = 0; i < kTogether; ++i) places[h][i] = murmur2(some[i], h) & mask_;
      for (uint32_t i = 0; i < many; ++i) {
        uint64_t held = 1;
        for (uint32_t h = 0; h < hashes_; ++h) {
          uint64_t& word = words_[places[h][i] >> 6];
          held &= word >> (places[h][i] & 63);
          word |= 1ull << (places[h][i] & 63);
        }
        fresh[size] = some[i];
        size += held == 0;
      }
    }
    return size;
  }

  static uint32_t murmur2(uint32_t key, uint32_t seed) {
    constexpr uint32_t kMix = 0x5bd1e995;
    key *= kMix, key ^= key >> 24, key *= kMix;
    uint32_t hash = (seed ^ 4) * kMix ^ key;
    hash ^= hash >> 13, hash *= kMix, hash ^= hash >> 15;
    return hash;
  }

  std::vector<uint64_t> words_;
  uint32_t mask_ = 0, hashes_ = 0;
};

// Candidates being evaluated together: the nodes they lead to that nobody had visited, and their scores.
struct Group {
  std::vector<uint32_t> picked, nodes;
  std::vector<float> scores;
  const Graph* graph = nullptr;
  const Query* query = nullptr;
  size_t count = 0;
  bool scored = false;
  alignas(64) std::atomic<uint64_t> claim{0};  // blocks << 32, and the next that nobody has taken
  alignas(64) std::atomic<uint32_t> done{0};

  void fetch(size_t begin, size_t end) const {
    for (size_t i = begin; i < std::min(end, count); ++i) prefetch(*graph, nodes[i]);
  }

  void score(size_t begin, size_t end) {
    for (size_t i = begin; i < std::min(end, count); i += 4)
      query->score4(*graph, nodes.data() + i, scores.data() + i);
  }

  // Scores all, alone.
  void finish() {
    if (!scored) score(0, count);
    scored = true;
  }

  // From here on any thread may score blocks; nothing else of the group may be read before it has taken one.
  void publish() {
    done.store(0, std::memory_order_relaxed);
    claim.store(uint64_t((count + kBlock - 1) / kBlock) << 32, std::memory_order_release);
  }

  // Scores blocks that nobody has taken until there are none, fetching one while it scores another. The group may be a
  // later one than the caller saw: what it takes it scores.
  void help() {
    for (int64_t held = take(), next; held >= 0; held = next) {
      next = take();
      score(size_t(held), size_t(held) + kBlock);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  // Returns when all blocks are scored.
  void join() {
    help();
    const uint32_t blocks = uint32_t(claim.load(std::memory_order_relaxed) >> 32);
    while (done.load(std::memory_order_acquire) != blocks) _mm_pause();
  }

 private:
  int64_t take() {
    const uint64_t seen = claim.load(std::memory_order_relaxed);
    if (uint32_t(seen) >= uint32_t(seen >> 32)) return -1;
    const uint64_t mine = claim.fetch_add(1, std::memory_order_acquire);
    if (uint32_t(mine) >= uint32_t(mine >> 32)) return -1;
    const size_t begin = size_t(uint32_t(mine)) * kBlock;
    fetch(begin, begin + kBlock);
    return int64_t(begin);
  }
};

// Threads that score groups for whoever holds `one`. They look for more for a while, then sleep; they outlive all calls,
// and the groups stay where they are, so that nobody has to wait until a helper has looked away.
struct Team {
  std::mutex one;
  Group groups[kRing];
  alignas(64) std::atomic<uint32_t> launched{0};
  alignas(64) std::atomic<uint32_t> asleep{0};
  int64_t helpers = 0;

  void grow(int64_t most) {
    for (; helpers < most; ++helpers) std::thread([this] { serve(); }).detach();
  }

  void wake() {
    if (asleep.load() > 0) wake_all(&launched);
  }

  void launch() {
    launched.fetch_add(1);
  }

 private:
  static constexpr int kLooks = 20000;

  void serve() {
    for (uint32_t at = launched.load();;) {
      await_change(launched, at, asleep, kLooks);
      const uint32_t now = launched.load();
      if (now - at > kRing) at = now - 1;
      groups[at++ % kRing].help();
    }
  }
};

struct Walked {
  int64_t hops, visited, waits;
};

// A candidate as a number: the nearer the greater, of two as near the lower node; the last bit tells that nobody has
// followed it yet.
using Key = uint64_t;
inline Key key_of(float score, uint32_t node) {
  score += 0.0f;  // there is one zero
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  bits ^= uint32_t(int32_t(bits) >> 31) | 0x80000000u;
  return Key(bits) << 32 | uint32_t(~(node << 2));
}
inline uint32_t node_of(Key key) { return ~uint32_t(key) >> 2; }

// One query's way through the lowest level.
class DelayedWalk {
 public:
  Query query;
  std::vector<Candidate> found;  // best first, their scores left out
  Walked walked{};

  void begin(const Graph& g, uint32_t entry, size_t ef, const Delay& delay, Team* team) {
    graph_ = &g, ef_ = ef, delay_ = delay, team_ = team;
    ring_ = team ? team->groups : own_.get();
    if (!ring_) own_.reset(new Group[kRing]), ring_ = own_.get();
    picked_ = expanded_ = synced_ = 0;
    origin_ = team ? team->launched.load() : 0;
    const size_t most = size_t(delay.candidates) * size_t(g.links);
    best_.resize(ef + most);
    better_.resize(most);
    visited_.clear(g.slots, read(g.state + 2), delay.bits, delay.hashes);
    uint32_t none;
    visited_.visit(&entry, 1, &none);
    walked = {0, 1, 0};
    best_[0] = key_of(query.score(g, entry), entry) & ~Key(1);
    size_ = 1, next_ = 1;
    Group& first = at(picked_++);
    first.picked.assign(1, entry);
    expand();
  }

  // Waits for the oldest group, and launches as many as then have room; false once none is in flight.
  bool step() {
    pick();
    if (!team_ && synced_ != expanded_) at(synced_).finish();  // while links come
    expand();
    return !ended();
  }

  void pick() {
    Group& oldest = at(synced_);
    team_ ? oldest.join() : oldest.finish();
    ++walked.waits;
    ++synced_;
    take(oldest);
    while (picked_ - synced_ < uint32_t(delay_.groups)) {
      Group& group = at(picked_);
      group.picked.clear();
      for (; next_ < size_ && group.picked.size() < size_t(delay_.candidates); ++next_) {
        if ((best_[next_] & 1) == 0) continue;
        const uint32_t node = node_of(best_[next_]);
        best_[next_] &= ~Key(1);
        group.picked.push_back(node);
        const uint32_t* links = graph_->at(node, 0);
        for (int64_t i = 0; i <= graph_->links; i += 16) _mm_prefetch(links + i, _MM_HINT_T0);
      }
      if (group.picked.empty()) break;
      ++picked_;
    }
  }

  void expand() {
    for (; expanded_ != picked_; ++expanded_) {
      Group& group = at(expanded_);
      const size_t most = group.picked.size() * size_t(graph_->links) + kBlock;
      if (group.nodes.size() < most) group.nodes.resize(most), group.scores.resize(most);
      size_t count = 0;
      for (const uint32_t node : group.picked) {
        const uint32_t* links = graph_->at(node, 0);
        count += visited_.visit(links + 1, read(links), group.nodes.data() + count);
      }
      for (size_t i = count; i % 4 != 0; ++i) group.nodes[i] = group.nodes[0];
      group.graph = graph_, group.query = &query, group.count = count, group.scored = false;
      walked.hops += int64_t(group.picked.size()), walked.visited += int64_t(count);
      if (team_)
        group.publish(), team_->launch();
      else
        group.fetch(0, count);
    }
  }

  bool ended() const { return synced_ == picked_; }

  void close() {
    found.resize(size_);
    for (size_t i = 0; i < size_; ++i) found[i] = {0.0f, node_of(best_[i]) << 2};
  }

 private:
  Group& at(uint32_t number) { return ring_[(origin_ + number) % kRing]; }

  void take(const Group& group) {
    size_t count = 0;
    const Key least = size_ == ef_ ? best_[size_ - 1] : 0;
    for (size_t i = 0; i < group.count; ++i) {
      better_[count] = key_of(group.scores[i], group.nodes[i]);
      count += better_[count] > least;
    }
    if (count == 0) return;
    std::sort(better_.begin(), better_.begin() + long(count), std::greater<Key>());
    size_t end = size_;
    for (size_t i = count; i-- > 0;) {
      const Key mine = better_[i];
      size_t place = 0;
      for (size_t left = end; left > 0;) {  // without branches: which way it goes cannot be foreseen
        const size_t half = (left + 1) / 2;
        const bool beyond = best_[place + half - 1] > mine;
        place += beyond ? half : 0;
        left = beyond ? left - half : half - 1;
      }
      std::memmove(best_.data() + place + i + 1, best_.data() + place, (end - place) * sizeof(Key));
      best_[place + i] = mine;
      end = place;
    }
    size_ = std::min(ef_, size_ + count);
    next_ = std::min(next_, end);
  }

  const Graph* graph_ = nullptr;
  size_t ef_ = 0, size_ = 0, next_ = 0;
  Delay delay_{};
  Team* team_ = nullptr;
  Group* ring_ = nullptr;
  std::unique_ptr<Group[]> own_;
  uint32_t origin_ = 0, picked_ = 0, expanded_ = 0, synced_ = 0;
  Visited visited_;
  std::vector<Key> best_, better_;  // best first
};

}  // namespace
