// Processors of a step's threads: one for each thread. The caller is free again when the step ends; helpers stay.
#pragma once
#include <omp.h>
#include <sched.h>

namespace spillway {

// Keeps the calling thread and the team that it begins to processors of their own, where they are as many as those that
// the thread may use. Linux wakes a thread on its waker's processor where another looks taken, as an idle one does in a
// virtual machine: then two threads that wait for each other share a processor, and the other idles.
class OwnProcessors {
 public:
  explicit OwnProcessors(int threads) {
    if (threads < 2 || sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) return;
    if (CPU_COUNT(&allowed_) != threads) return;
    const int here = sched_getcpu();
    if (here >= 0 && keep_to(here)) caller_ = here;
  }
  ~OwnProcessors() {
    if (caller_ >= 0) sched_setaffinity(0, sizeof allowed_, &allowed_);
  }
  OwnProcessors(const OwnProcessors&) = delete;
  OwnProcessors& operator=(const OwnProcessors&) = delete;

  // Called by each thread of the team.
  void take() const {
    static thread_local int taken = -1;
    const int number = omp_get_thread_num();
    if (caller_ < 0 || number == 0) return;
    int mine = 0;
    for (int left = number; mine < CPU_SETSIZE; ++mine)
      if (mine != caller_ && CPU_ISSET(mine, &allowed_) && --left == 0) break;
    if (mine != taken && mine < CPU_SETSIZE && keep_to(mine)) taken = mine;
  }

 private:
  static bool keep_to(int processor) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(processor, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
  }

  cpu_set_t allowed_;
  int caller_ = -1;  // -1: threads run where they are put
};

}  // namespace spillway
