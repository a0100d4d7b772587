// Memory of a model's weights: one matrix after another in huge pages, where the system has them.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Stretch& stretch : stretches_) munmap(stretch.mapped, stretch.bytes);
  }

  // So many bytes, all 0, at the start of a line of memory; nullptr if there are none. Bytes lie where the last ones end:
  // a matrix that had pages of its own would end in half of a huge page, which is as much as a small matrix.
  uint8_t* take(size_t bytes) {
    bytes = up(bytes, LINE);
    if (bytes > left_ && !map(bytes)) return nullptr;
    uint8_t* taken = next_;
    next_ += bytes, left_ -= bytes;
    return taken;
  }

 private:
  struct Stretch {
    void* mapped;
    size_t bytes;
  };
  static constexpr size_t LINE = 64, HUGE_PAGE = 2 << 20, STRETCH = 256 << 20;
  static size_t up(size_t value, size_t to) { return (value + to - 1) / to * to; }

  // Map a stretch that begins with a huge page; what is never written takes no memory.
  bool map(size_t bytes) {
    bytes = std::max(STRETCH, up(bytes, HUGE_PAGE));
    const size_t mapped = bytes + HUGE_PAGE;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    stretches_.push_back({memory, mapped});
    next_ = (uint8_t*)up((size_t)memory, HUGE_PAGE), left_ = bytes;
#if defined(MADV_HUGEPAGE)
    madvise(next_, bytes, MADV_HUGEPAGE);
#endif
    return true;
  }

  uint8_t* next_ = nullptr;
  size_t left_ = 0;
  std::vector<Stretch> stretches_;
};

}  // namespace spillway
