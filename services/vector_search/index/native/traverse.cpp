// An HNSW graph over rows rounded to 8 bits: built and searched by many threads at once, scored exactly at the end.
// Built by common/native/library.py for processors with AVX512-VNNI or AVX2; called by services/vector_search/index/native_graph.py.
//
// One thread at a time calls `spillway_insert`, any number `spillway_search` meanwhile. A search may read a list of links
// while it is written: whatever it sees are nodes of the graph, since words are written whole and counts after them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "crew.h"
#include "delayed.h"
#include "graph.h"

namespace {

struct Scratch {
  Query query, other;
  std::vector<uint64_t> seen;
  std::vector<Candidate> best;  // best first
  std::vector<uint32_t> fresh;
  std::vector<float> scores;
  std::vector<Candidate> better;
  std::vector<std::pair<float, int64_t>> scored;
  std::vector<uint32_t> linked;
};

// Goes to the nearest node that single steps lead to, from level `from` down to above `to`.
uint32_t descend(const Graph& g, const Query& query, uint32_t at, int64_t from, int64_t to) {
  float score = query.score(g, at);
  for (int64_t level = from; level > to; --level) {
    for (bool moved = true; moved;) {
      moved = false;
      const uint32_t* links = g.at(at, level);
      const uint32_t count = read(links);
      for (uint32_t i = 1; i <= count; ++i) prefetch(g, read(links + i));
      for (uint32_t i = 1; i <= count; ++i) {
        const uint32_t node = read(links + i);
        const float other = query.score(g, node);
        if (other > score) score = other, at = node, moved = true;
      }
    }
  }
  return at;
}

// Puts `count` new candidates in their places among the `size` best; returns the first place that changed.
size_t merge(Candidate* best, size_t size, Candidate* fresh, size_t count) {
  std::sort(fresh, fresh + count, [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  size_t end = size;
  for (size_t i = count; i-- > 0;) {
    const float score = fresh[i].score;
    size_t place = 0;
    for (size_t left = end; left > 0;) {  // without branches: which way it goes cannot be foreseen
      const size_t half = (left + 1) / 2;
      const bool beyond = best[place + half - 1].score >= score;
      place += beyond ? half : 0;
      left = beyond ? left - half : half - 1;
    }
    std::memmove(best + place + i + 1, best + place, (end - place) * sizeof(Candidate));
    best[place + i] = fresh[i];
    end = place;
  }
  return end;
}

// Finds the `ef` best nodes of a level that can be reached from `begin`; s.best holds them, best first. With kDeleted,
// `ef` that are not deleted, and the deleted ones between them, but no more than eight times as many.
template <bool kDeleted>
void walk(const Graph& g, int64_t level, uint32_t begin, size_t ef, Scratch& s) {
  const int64_t most = g.most(level);
  s.seen.resize(std::max(s.seen.size(), size_t(g.slots + 63) / 64));
  std::memset(s.seen.data(), 0, size_t(read(g.state + 2) + 63) / 64 * 8);
  const size_t largest = kDeleted ? 8 * ef : ef;
  s.best.resize(largest + size_t(most));
  s.fresh.resize(size_t(most) + 4);
  s.scores.resize(size_t(most) + 4);
  s.better.resize(size_t(most));
  const auto marked = [&](uint32_t node) {
    return node << 2 | uint32_t(kDeleted && node < g.rows && !g.live[node]) << 1;
  };
  s.seen[begin >> 6] |= 1ull << (begin & 63);
  Candidate* best = s.best.data();
  best[0] = {s.query.score(g, begin), marked(begin)};
  size_t size = 1, next = 0, room = ef + best[0].deleted();
  while (next < size) {
    best[next].mark |= 1;
    const uint32_t* links = g.at(best[next].node(), level);
    const uint32_t count = read(links);
    size_t fresh = 0;
    for (uint32_t i = 1; i <= count; ++i) {
      const uint32_t node = read(links + i);
      const uint64_t bit = 1ull << (node & 63);
      s.fresh[fresh] = node;
      fresh += (s.seen[node >> 6] & bit) == 0;
      s.seen[node >> 6] |= bit;
    }
    for (size_t i = 0; i < fresh; ++i) prefetch(g, s.fresh[i]);
    for (size_t i = fresh; i % 4 != 0; ++i) s.fresh[i] = s.fresh[0];
    for (size_t i = 0; i < fresh; i += 4) s.query.score4(g, s.fresh.data() + i, s.scores.data() + i);
    const float least = size >= room ? best[size - 1].score : -INFINITY;
    size_t better = 0;
    for (size_t i = 0; i < fresh; ++i) {
      s.better[better] = {s.scores[i], marked(s.fresh[i])};
      better += s.scores[i] > least;
    }
    size_t first = next + 1;
    if (better > 0) {
      first = std::min(first, merge(best, size, s.better.data(), better));
      size += better;
      if (kDeleted) {
        for (size_t i = 0; i < better; ++i) room += s.better[i].deleted();
        while (size > std::min(room, largest)) room -= best[--size].deleted();
      } else {
        size = std::min(ef, size);
      }
    }
    for (next = first; next < size && best[next].followed(); ++next) {
    }
    if (next < size) {
      const uint32_t* coming = g.at(best[next].node(), level);
      for (int64_t i = 0; i <= most; i += 16) _mm_prefetch(coming + i, _MM_HINT_T0);
    }
  }
  s.best.resize(size);
}

// Keeps, of candidates for a node's links (best first), those nearer to the node than to any kept before.
void select(const Graph& g, uint32_t node, std::vector<Candidate>& candidates, size_t most, Scratch& s) {
  const float own = g.weights[2 * int64_t(node) + 1];
  size_t kept = 0;
  s.fresh.resize(most + 4);
  float scores[4];
  for (const Candidate& candidate : candidates) {
    if (kept == most) break;
    const uint32_t other = candidate.node();
    s.other.set(g, other);
    const float far = candidate.score - g.weights[2 * int64_t(other) + 1] + own;
    bool good = true;
    for (size_t i = 0; good && i < kept; i += 4) {
      for (size_t j = kept; j < i + 4; ++j) s.fresh[j] = s.fresh[0];
      s.other.score4(g, s.fresh.data() + i, scores);
      good = std::max(std::max(scores[0], scores[1]), std::max(scores[2], scores[3])) <= far;
    }
    if (good) s.fresh[kept++] = other;
  }
  s.fresh.resize(kept);
}

void put(uint32_t* links, const std::vector<uint32_t>& nodes) {
  for (size_t i = 0; i < nodes.size(); ++i) write(links + i + 1, nodes[i]);
  write(links, uint32_t(nodes.size()));
}

constexpr size_t kLocks = 4096;
struct Locks {
  std::atomic_flag flags[kLocks] = {};
  std::mutex entry;
};

// Links `node` from `from`, which forgets others if it has too many then.
void link(const Graph& g, uint32_t from, int64_t level, uint32_t node, Locks& locks, Scratch& s) {
  std::atomic_flag& lock = locks.flags[from % kLocks];
  while (lock.test_and_set(std::memory_order_acquire)) _mm_pause();
  uint32_t* links = g.at(from, level);
  const uint32_t count = links[0];
  if (count < g.most(level)) {
    write(links + count + 1, node);
    write(links, count + 1);
  } else {
    s.query.set(g, from);
    s.best.clear();
    for (uint32_t i = 1; i <= count; ++i) s.best.push_back({s.query.score(g, links[i]), links[i] << 2});
    s.best.push_back({s.query.score(g, node), node << 2});
    std::sort(s.best.begin(), s.best.end(),
              [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    select(g, from, s.best, size_t(g.most(level)), s);
    put(links, s.fresh);
  }
  lock.clear(std::memory_order_release);
}

void insert(const Graph& g, uint32_t node, size_t ef, Locks& locks, Scratch& s) {
  const int64_t height = g.heights[node];
  int64_t levels;
  {
    std::lock_guard<std::mutex> guard(locks.entry);
    levels = g.state[1];
    if (levels < 0) {
      write(g.state, node);
      write(g.state + 1, height);
      return;
    }
  }
  s.query.set(g, node);
  uint32_t begin = descend(g, s.query, uint32_t(g.state[0]), levels, height);
  const int64_t top = std::min(height, levels);
  // Nothing leads here before all levels have links: whoever comes finds the way on.
  for (int64_t level = top; level >= 0; --level) {
    walk<false>(g, level, begin, ef, s);
    begin = s.best[0].node();
    select(g, node, s.best, size_t(g.upper_links), s);
    put(g.at(node, level), s.fresh);
  }
  for (int64_t level = 0; level <= top; ++level) {
    const uint32_t* links = g.at(node, level);
    s.linked.assign(links + 1, links + 1 + links[0]);
    for (const uint32_t other : s.linked) link(g, other, level, node, locks, s);
  }
  if (height > levels) {
    std::lock_guard<std::mutex> guard(locks.entry);
    if (height > g.state[1]) {
      write(g.state, node);
      write(g.state + 1, height);  // after the node that has so many
    }
  }
}

void encode(const Graph& g, const float* x, int64_t row) {
  uint8_t* code = g.codes + row * g.width;
  std::memset(code, 128, size_t(g.width));
  float square;
  g.weights[2 * row] = round_row(x, g.dimension, code, square);
  g.weights[2 * row + 1] = g.l2 ? -0.5f * square : 0.0f;
}

// Scores the best of a walk exactly; writes at most k rows, or their labels, and scores, best first; returns how many.
int64_t rank(const Graph& g, const float* q, int64_t k, int64_t spare, const std::vector<Candidate>& best, bool labelled,
             int64_t* rows, float* scores, Scratch& s) {
  s.scored.clear();
  for (const Candidate& candidate : best) {
    const int64_t row = candidate.node();
    if (row >= g.rows || !g.live[row]) continue;  // newer than the matrix that is read here, or deleted
    for (int64_t d = 0; d < g.dimension; d += 16)
      _mm_prefetch(g.matrix + row * g.dimension + d, _MM_HINT_T0);
    s.scored.emplace_back(0.0f, row);
    if (int64_t(s.scored.size()) == k + spare) break;
  }
  for (auto& [score, row] : s.scored) score = exact(g, q, row);
  const int64_t found = std::min<int64_t>(k, int64_t(s.scored.size()));
  std::partial_sort(s.scored.begin(), s.scored.begin() + found, s.scored.end(),
                    [](const auto& a, const auto& b) { return a.first > b.first; });
  for (int64_t i = 0; i < found; ++i) {
    const auto [score, row] = s.scored[i];
    scores[i] = score, rows[i] = labelled ? g.labels[row] : row;
  }
  return found;
}

// Lowers `least` to `found`, whichever threads do so.
void lower(std::atomic<int64_t>& least, int64_t found) {
  for (int64_t seen = least; found < seen && !least.compare_exchange_weak(seen, found);) {
  }
}

}  // namespace

constexpr int64_t kTaken = 4;  // queries that a thread takes at a time: fewer are not worth waking another

// Calls work(scratch, i) for 0 <= i < count on `threads` threads, this one among them, each taking `together` at a time.
template <typename Work>
void share(int64_t count, int64_t threads, int64_t together, const Work& work) {
  std::atomic<int64_t> begun{0};
  auto run = [&] {
    thread_local Scratch scratch;
    for (int64_t at; (at = begun.fetch_add(together)) < count;)
      for (int64_t i = at; i < std::min(at + together, count); ++i) work(scratch, i);
  };
  const int64_t others = std::min(threads, (count + together - 1) / together) - 1;
  static Crew* const crew = new Crew;  // its threads outlive everything
  if (others <= 0) return run();
  if (crew->share(others, run)) return;
  std::vector<std::thread> made;
  for (int64_t t = 0; t < others; ++t) made.emplace_back(run);
  run();
  for (auto& other : made) other.join();
}

// Searches `count` queries among rows some of which are deleted; returns the least number of rows found.
extern "C" int64_t spillway_search(const Graph* graph, const float* queries, int64_t count, int64_t k, int64_t ef,
                                   int64_t spare, int64_t threads, int64_t labelled, int64_t* rows, float* scores) {
  const Graph& g = *graph;
  const int64_t levels = read(g.state + 1);
  if (levels < 0) return 0;
  std::atomic<int64_t> least{k};
  share(count, threads, kTaken, [&](Scratch& s, int64_t i) {
    const float* q = queries + i * g.dimension;
    s.query.set(g, q);
    walk<true>(g, 0, descend(g, s.query, uint32_t(read(g.state)), levels, 0), size_t(std::max(ef, k)), s);
    lower(least, rank(g, q, k, spare, s.best, labelled, rows + i * k, scores + i * k, s));
  });
  return least;
}

// Searches as `spillway_search`, by delayed synchronization, among rows none of which is deleted; writes how far each
// query walked where `walked` is not null. A walk is helped by `helpers` threads, or else a thread has `together` walks in turn.
extern "C" int64_t spillway_search_delayed(const Graph* graph, const float* queries, int64_t count, int64_t k,
                                           int64_t ef, int64_t spare, const Delay* delay, int64_t threads,
                                           int64_t labelled, int64_t* rows, float* scores, Walked* walked) {
  const Graph& g = *graph;
  if (read(g.state + 1) < 0) return 0;
  std::atomic<int64_t> least{k};
  const auto begin = [&](DelayedWalk& walk, int64_t i, Team* team) {
    walk.query.set(g, queries + i * g.dimension);
    const uint32_t entry = descend(g, walk.query, uint32_t(read(g.state)), read(g.state + 1), 0);
    walk.begin(g, entry, size_t(std::max(ef, k)), *delay, team);
  };
  const auto end = [&](DelayedWalk& walk, int64_t i, Scratch& scratch) {
    walk.close();
    if (walked) walked[i] = walk.walked;
    const float* q = queries + i * g.dimension;
    lower(least, rank(g, q, k, spare, walk.found, labelled, rows + i * k, scores + i * k, scratch));
  };
  if (delay->helpers > 0) {
    static Team* const team = new Team;  // its threads outlive everything
    static DelayedWalk* const walk = new DelayedWalk;
    thread_local Scratch scratch;
    std::lock_guard<std::mutex> guard(team->one);
    team->grow(delay->helpers);
    for (int64_t i = 0; i < count; ++i) {
      team->wake();
      begin(*walk, i, team);
      while (walk->step()) {
      }
      end(*walk, i, scratch);
    }
    return least;
  }
  share((count + delay->together - 1) / delay->together, threads, delay->together == 1 ? kTaken : 1, [&](Scratch& scratch, int64_t part) {
    thread_local std::vector<DelayedWalk> walks;
    const int64_t first = part * delay->together, size = std::min(delay->together, count - first);
    if (int64_t(walks.size()) < size) walks = std::vector<DelayedWalk>(size_t(size));
    if (size == 1) {
      begin(walks[0], first, nullptr);
      while (walks[0].step()) {
      }
      end(walks[0], first, scratch);
      return;
    }
    for (int64_t i = 0; i < size; ++i) begin(walks[i], first + i, nullptr);
    for (int64_t left = size; left > 0;) {
      for (int64_t i = 0; i < size; ++i)
        if (!walks[i].ended()) walks[i].pick();
      left = 0;
      for (int64_t i = 0; i < size; ++i) walks[i].expand(), left += !walks[i].ended();
    }
    for (int64_t i = 0; i < size; ++i) end(walks[i], first + i, scratch);
  });
  return least;
}

// Rounds `count` vectors to the codes of their rows.
extern "C" void spillway_encode(const Graph* graph, const float* vectors, const int64_t* rows, int64_t count,
                                int64_t threads) {
  share(count, threads, 64, [&](Scratch&, int64_t i) { encode(*graph, vectors + i * graph->dimension, rows[i]); });
}

// Puts `count` rows of the matrix, whose heights and places for links are set, into the graph.
extern "C" void spillway_insert(const Graph* graph, const int64_t* rows, int64_t count, int64_t ef,
                                int64_t threads) {
  const Graph& g = *graph;
  share(count, threads, 64, [&](Scratch&, int64_t i) { encode(g, g.matrix + rows[i] * g.dimension, rows[i]); });
  Locks locks;
  share(count, threads, 8, [&](Scratch& scratch, int64_t i) { insert(g, uint32_t(rows[i]), size_t(ef), locks, scratch); });
}
