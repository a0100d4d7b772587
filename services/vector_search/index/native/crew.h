// Threads that stay, and share the work of one call at a time: to make threads anew takes as long as some hundred queries.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "futex.h"

namespace {

// They look for the next call for a while, then sleep.
class Crew {
 public:
  // Calls `run` on this thread and on up to `others` more, and returns when all have; false, and nothing is done, while
  // the crew works for another call, and for a thread of lower priority than the process, which the crew would not have.
  template <typename Run>
  bool share(int64_t others, Run& run) {
    if (getpriority(PRIO_PROCESS, 0) > getpriority(PRIO_PROCESS, id_t(getpid()))) return false;
    std::unique_lock<std::mutex> mine(one_, std::try_to_lock);
    if (!mine) return false;
    while (int64_t(members_.size()) < others) {
      members_.emplace_back(new Member);
      std::thread([this, member = members_.back().get()] { serve(*member); }).detach();
    }
    call_ = [](void* run) { (*static_cast<Run*>(run))(); }, run_ = &run;
    places_.store(others);
    calls_.fetch_add(1);
    if (asleep_.load() > 0) wake();
    run();
    places_.store(0);  // who has not begun need not
    for (int look = 0; helping_.load() > 0; ++look) look < kLooks ? _mm_pause() : void(sched_yield());
    return true;
  }

 private:
  static constexpr int kLooks = 2000;

  struct Member {
    std::atomic<pid_t> thread{0};
    int away_from = -1;  // the processor that it keeps off, which a caller had
  };

  // Linux may wake a thread on the processor of whoever wakes it, where both would wait for each other.
  void wake() {
    const int here = sched_getcpu();
    for (const auto& member : members_) {
      const pid_t thread = member->thread.load();
      cpu_set_t others;
      if (thread == 0 || member->away_from == here || sched_getaffinity(0, sizeof others, &others) != 0) continue;
      CPU_CLR(here, &others);
      if (CPU_COUNT(&others) > 0 && sched_setaffinity(thread, sizeof others, &others) == 0) member->away_from = here;
    }
    wake_all(&calls_);
  }

  void serve(Member& member) {
    member.thread.store(gettid());
    for (uint32_t seen = 0;;) {
      await_change(calls_, seen, asleep_, kLooks);
      seen = calls_.load();
      helping_.fetch_add(1);  // before a place is taken: whoever ends a call sees those that work for it
      if (took_place()) call_(run_);
      helping_.fetch_sub(1);
    }
  }

  bool took_place() {
    int64_t left = places_.load();
    while (left > 0 && !places_.compare_exchange_weak(left, left - 1)) {
    }
    return left > 0;
  }

  std::mutex one_;
  std::vector<std::unique_ptr<Member>> members_;
  void (*call_)(void*) = nullptr;
  void* run_ = nullptr;
  alignas(64) std::atomic<uint32_t> calls_{0};
  std::atomic<uint32_t> asleep_{0};
  alignas(64) std::atomic<int64_t> places_{0};
  alignas(64) std::atomic<int64_t> helping_{0};
};

}  // namespace
