// How fast memory is read: what attention on the host, which does little else, is compared with.
#include <omp.h>
#include <time.h>

#include <cstdint>
#include <utility>

namespace {

typedef float F __attribute__((vector_size(64)));
struct alignas(64) Line {
  uint64_t next;
};

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

}  // namespace

extern "C" {
// Nanoseconds of one read that waits for the one before, all over `bytes` of memory, which is overwritten.
double spillway_memory_latency(void* memory, int64_t bytes, int64_t reads) {
  Line* lines = (Line*)memory;
  const uint64_t count = bytes / sizeof(Line);
  uint64_t seed = 88172645463325252u;
  const auto below = [&](uint64_t most) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % most;
  };
  for (uint64_t i = 0; i < count; ++i) lines[i].next = i;
  for (uint64_t i = count - 1; i > 0; --i) std::swap(lines[i].next, lines[below(i)].next);  // Sattolo: one cycle
  uint64_t at = 0;
  const int64_t began = now_ns();
  for (int64_t i = 0; i < reads; ++i) at = lines[at].next;
  const int64_t took = now_ns() - began;
  volatile uint64_t end = at;  // else nothing is read
  (void)end;
  return double(took) / double(reads);
}

// Bytes a second of reading `bytes` of memory front to back by so many threads.
double spillway_memory_bandwidth(const void* memory, int64_t bytes, int threads) {
  constexpr int64_t PIECE = 1 << 18, WIDE = 8;
  float total = 0;
  const int64_t began = now_ns();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (int64_t piece = 0; piece < bytes / PIECE; ++piece) {
    const F* at = (const F*)((const uint8_t*)memory + piece * PIECE);
    F sums[WIDE] = {};
    for (int64_t i = 0; i < PIECE / int64_t(sizeof(F)); i += WIDE)
      for (int64_t j = 0; j < WIDE; ++j) sums[j] += at[i + j];
    for (int64_t j = 0; j < WIDE; ++j) total += sums[j][0];
  }
  const int64_t took = now_ns() - began;
  volatile float end = total;
  (void)end;
  return double(bytes / PIECE * PIECE) * 1e9 / double(took);
}
}
