// Waiting for a word of memory to change, and waking those that wait.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

inline void wait_on(std::atomic<uint32_t>* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// Returns once `word` is no longer `seen`: looks for a while, then sleeps, counted in `asleep`, until it is woken.
inline void await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& asleep, int looks) {
  for (;;) {
    for (int look = 0; word.load(std::memory_order_acquire) == seen && look < looks; ++look) _mm_pause();
    if (word.load() != seen) return;
    asleep.fetch_add(1);
    wait_on(&word, seen);
    asleep.fetch_sub(1);
  }
}

}  // namespace
