// Slots in shared memory, through which a process that owns pages hands attention to a helper, another process.
//
// The owner appends keys and values to the pages, writes a layer's queries into a slot, and computes something else; the
// helper, which maps the pages for reading only, attends and writes the result into the slot. So whatever becomes of a
// helper, the pages are right, and what it has not done in time the owner computes itself. A slot's word holds a ticket
// and a state:
//
//   FREE, DONE         -> SUBMITTED  by the owner: arguments and queries are written
//   SUBMITTED          -> CLAIMED    by the helper, in the order of tickets
//   CLAIMED            -> DONE       by the helper: the result is written
//   SUBMITTED, CLAIMED -> TAKEN      by the owner: it does not wait any longer, and writes nothing into the slot
//   TAKEN              -> FREE       by the helper: it has let go
//
// A helper that stands still lets nothing go, and gets nothing then. Each attachment has an epoch and slots of its own.
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <memory>

#include "attention.h"
#include "rows.h"

using namespace spillway;

namespace {

enum State : uint64_t { FREE, SUBMITTED, CLAIMED, DONE, TAKEN };
constexpr int STATE_BITS = 8;
constexpr int64_t SPIN_NS = 50000, SECOND_NS = 1000000000, LINE = 64, NEVER = INT64_MAX;
constexpr int64_t FEW = 8;  // rows that one thread appends sooner than several would have begun

struct Header {
  uint64_t epoch;
  alignas(LINE) std::atomic<uint32_t> bell;  // rises when a helper has something to look at
  std::atomic<uint32_t> ended;
};

struct Slot {
  alignas(LINE) std::atomic<uint64_t> word;  // ticket << STATE_BITS | state
  alignas(LINE) uint64_t step;               // which arguments these are
  int64_t rows, sequences, group, layer;
  int64_t front;                             // whether the helper attends to fronts only, and nothing is appended
  int64_t begin_ns, end_ns;                  // of the helper's attention
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a futex lies in the low half of a word");
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8, "processes share words");

struct Shape {
  Heads heads;
  int64_t epoch, slots, rows, entries, kind, groups;  // rows, and entries of page tables, of a slot
};

struct Group {
  int64_t offset, layers, window;  // where its pages begin in the memory of pages
};

// One side's view of the shared memory.
struct Channel {
  Shape shape;
  Heads of;
  uint8_t* memory;
  std::vector<Pages> pages;
  std::atomic<bool> stopped{false};         // helper: this process is to end
  uint64_t tickets = 0, steps = 0;          // owner
  std::vector<std::vector<Attention>> attentions;  // helper: by slot and group, of the step in `planned`
  std::vector<uint64_t> planned;
  std::vector<float> queries;

  int64_t positions_at() const { return up(sizeof(Slot), LINE); }
  int64_t ends_at() const { return positions_at() + up(shape.rows * 8, LINE); }
  int64_t fronts_at() const { return ends_at() + up(shape.rows * 8, LINE); }
  int64_t starts_at(int64_t group) const { return fronts_at() + (1 + group) * up(shape.rows * 8 + 8, LINE); }
  int64_t tables_at(int64_t group) const { return starts_at(shape.groups) + group * up(shape.entries * 4, LINE); }
  int64_t queries_at() const { return tables_at(shape.groups); }
  int64_t out_at() const { return queries_at() + up(shape.rows * of.heads * of.dim * 4, LINE); }
  int64_t slot_bytes() const { return out_at() + up(out_floats(shape.rows, true) * 4, LINE); }
  // Of fronts the largest scores and the sums of weights follow the sums of values.
  int64_t out_floats(int64_t rows, bool front) const { return rows * of.heads * (front ? of.dim + 2 : of.dim); }
  int64_t bytes() const { return up(sizeof(Header), LINE) + shape.slots * slot_bytes(); }

  Header& header() const { return *(Header*)memory; }
  uint8_t* slot_at(int64_t slot) const { return memory + up(sizeof(Header), LINE) + slot * slot_bytes(); }
  Slot& slot(int64_t number) const { return *(Slot*)slot_at(number); }
  int64_t* positions(int64_t slot) const { return (int64_t*)(slot_at(slot) + positions_at()); }
  int64_t* ends(int64_t slot) const { return (int64_t*)(slot_at(slot) + ends_at()); }
  int64_t* fronts(int64_t slot) const { return (int64_t*)(slot_at(slot) + fronts_at()); }
  float* sent(int64_t slot) const { return (float*)(slot_at(slot) + queries_at()); }
  float* out(int64_t slot) const { return (float*)(slot_at(slot) + out_at()); }

  // A group's pages with the page tables of a slot.
  Pages pages_of(int64_t slot, int64_t group) const {
    Pages found = pages[group];
    found.tables = (const int32_t*)(slot_at(slot) + tables_at(group));
    found.starts = (const int64_t*)(slot_at(slot) + starts_at(group));
    return found;
  }
};

State state_of(uint64_t word) { return State(word & ((1 << STATE_BITS) - 1)); }
uint64_t with_state(uint64_t word, State state) { return (word >> STATE_BITS << STATE_BITS) | state; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * SECOND_NS + now.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleep while the 4 bytes at `at` are `seen`, at most so long; may return early.
void futex_wait(void* at, uint32_t seen, int64_t most_ns) {
  timespec most{most_ns / SECOND_NS, most_ns % SECOND_NS};
  syscall(SYS_futex, at, FUTEX_WAIT, seen, most_ns == NEVER ? nullptr : &most, nullptr, 0);
}

void futex_wake(void* at) { syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Return once `changed()`, at most so long: spin for a moment, then sleep. `low()` is what lies at `at`.
template <class Changed, class Low>
bool await(void* at, int64_t most_ns, Low low, Changed changed) {
  const int64_t began = now_ns(), due = most_ns == NEVER ? NEVER : began + most_ns;
  for (;;) {
    const uint32_t seen = low();
    if (changed()) return true;
    const int64_t now = now_ns();
    if (now >= due) return false;
    if (now - began < SPIN_NS)
      relax();
    else
      futex_wait(at, seen, due == NEVER ? NEVER : due - now);
  }
}

void ring(Channel& c) {
  c.header().bell.fetch_add(1);
  futex_wake(&c.header().bell);
}

// Take a slot from the helper; false if it is done, or was not submitted.
bool take(Channel& c, Slot& slot) {
  uint64_t word = slot.word.load(std::memory_order_acquire);
  while (state_of(word) == SUBMITTED || state_of(word) == CLAIMED)
    if (slot.word.compare_exchange_weak(word, with_state(word, TAKEN))) {
      futex_wake(&slot.word);
      ring(c);
      return true;
    }
  return false;
}

// The slot to be served next; those that were taken are let go. -1: none.
int64_t next_of(Channel& c) {
  int64_t found = -1;
  uint64_t least = UINT64_MAX;
  for (int64_t n = 0; n < c.shape.slots; ++n) {
    uint64_t word = c.slot(n).word.load(std::memory_order_acquire);
    if (state_of(word) == TAKEN) c.slot(n).word.compare_exchange_strong(word, with_state(word, FREE));
    if (state_of(word) == SUBMITTED && word < least) least = word, found = n;
  }
  return found;
}

// Work out what a slot's arguments mean, once a step.
void plan(Channel& c, int64_t number, int threads) {
  const Slot& slot = c.slot(number);
  if (c.planned[number] == slot.step) return;
  for (int64_t g = 0; g < c.shape.groups; ++g)
    c.attentions[number][g].plan(c.of, c.pages_of(number, g), c.positions(number), c.ends(number), slot.sequences, threads,
                                 true, slot.front ? FRONT : WHOLE, c.fronts(number));
  c.planned[number] = slot.step;
}

void attend(Channel& c, int64_t number, int threads) {
  Slot& slot = c.slot(number);
  plan(c, number, threads);
  const Pages pages = c.pages_of(number, slot.group);
  const int64_t size = c.of.heads * c.of.dim, padded = c.of.heads * c.of.width();
  if (int64_t(c.queries.size()) < slot.rows * padded) c.queries.resize(slot.rows * padded);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < slot.rows; ++r)
      pad_queries(c.of, pages.kind, c.sent(number) + r * size, c.queries.data() + r * padded);
    float *out = c.out(number), *row_max = out + slot.rows * size;
    c.attentions[number][slot.group].run(c.of, pages, slot.layer, c.queries.data(), c.positions(number), out,
                                         slot.front ? row_max : nullptr,
                                         slot.front ? row_max + slot.rows * c.of.heads : nullptr);
  }
}

// Append a layer's keys and values (rows, heads + 2 kv heads, dim) to the pages of a slot's arguments, unless these are
// fronts, and copy its queries
// to `queries` (rows, heads, dim) if there is such a place.
void append_rows(Channel& c, int64_t number, int64_t group, int64_t layer, const float* joined, float* queries, int threads) {
  const int64_t rows = c.slot(number).rows;
  const Pages pages = c.pages_of(number, group);
  const std::vector<int64_t> owners = owners_of(rows, c.ends(number));
  const int64_t size = c.of.heads * c.of.dim, wide = size + 2 * c.of.kv_heads * c.of.dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > FEW)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t position = c.positions(number)[r];
    const int32_t page = pages.tables[pages.starts[owners[r]] + position / PAGE];
    if (!c.slot(number).front) append(pages, c.of, layer, page, position % PAGE, joined + r * wide);
    if (queries) std::memcpy(queries + r * size, joined + r * wide, size * 4);
  }
}

}  // namespace

extern "C" {
// One side's view of slots in `memory`, and of pages, to be freed. The owner's makes the slots; `memory` is zero then.
void* spillway_channel(void* memory, void* pages, const Shape* shape, const Group* groups, int owner) {
  auto c = std::make_unique<Channel>();
  c->shape = *shape;
  c->of = shape->heads;
  c->memory = (uint8_t*)memory;
  for (int64_t g = 0; g < shape->groups; ++g)
    c->pages.push_back({(uint8_t*)pages + groups[g].offset, Kind(shape->kind), groups[g].layers, groups[g].window, nullptr,
                        nullptr});
  c->attentions.resize(shape->slots, std::vector<Attention>(shape->groups));
  c->planned.assign(shape->slots, 0);
  if (owner) c->header().epoch = shape->epoch;
  return c.release();
}

void spillway_channel_free(void* channel) { delete (Channel*)channel; }

// How many bytes the slots of a shape take.
int64_t spillway_channel_bytes(const Shape* shape) {
  Channel c;
  c.shape = *shape;
  c.of = shape->heads;
  return c.bytes();
}

// The number of the attachment that the slots belong to.
int64_t spillway_channel_epoch(const void* channel) { return ((const Channel*)channel)->header().epoch; }

// Owner: write a step's arguments into a slot, page tables and their starts group by group; returns whether they fit, and
// the helper has let go of the slot. With `fronts` the helper attends to so many first pages of each sequence only.
int spillway_channel_plan(void* channel, int64_t number, int64_t rows, const int64_t* positions, int64_t sequences,
                          const int64_t* ends, const int32_t* const* tables, const int64_t* const* starts,
                          const int64_t* fronts) {
  Channel& c = *(Channel*)channel;
  Slot& slot = c.slot(number);
  const State state = state_of(slot.word.load(std::memory_order_acquire));
  if ((state != FREE && state != DONE) || rows > c.shape.rows || c.header().ended.load()) return 0;
  for (int64_t g = 0; g < c.shape.groups; ++g)
    if (starts[g][sequences] > c.shape.entries) return 0;
  slot.step = ++c.steps;
  slot.rows = rows, slot.sequences = sequences;
  std::memcpy(c.positions(number), positions, rows * 8);
  std::memcpy(c.ends(number), ends, sequences * 8);
  slot.front = fronts != nullptr;
  if (fronts) std::memcpy(c.fronts(number), fronts, sequences * 8);
  for (int64_t g = 0; g < c.shape.groups; ++g) {
    const Pages to = c.pages_of(number, g);
    std::memcpy((void*)to.tables, tables[g], starts[g][sequences] * 4);
    std::memcpy((void*)to.starts, starts[g], (sequences + 1) * 8);
  }
  return 1;
}

// Owner: append a layer's keys and values (rows, heads + 2 kv heads, dim) to the pages, and hand its queries over.
void spillway_channel_submit(void* channel, int64_t number, int64_t group, int64_t layer, const float* joined, int threads) {
  Channel& c = *(Channel*)channel;
  Slot& slot = c.slot(number);
  append_rows(c, number, group, layer, joined, c.sent(number), threads);
  slot.group = group, slot.layer = layer;
  slot.word.store(++c.tickets << STATE_BITS | SUBMITTED);
  ring(c);
  if (c.header().ended.load()) take(c, slot);
}

// Owner: append a layer's keys and values to the pages only; the queries go elsewhere.
void spillway_channel_append(void* channel, int64_t number, int64_t group, int64_t layer, const float* joined, int threads) {
  append_rows(*(Channel*)channel, number, group, layer, joined, nullptr, threads);
}

// Owner: wait at most so long for what was submitted. Returns 1 with the result (rows, heads, dim), of fronts also their
// largest scores and sums of weights (rows, heads), and when its attention began and ended, in nanoseconds, or 0: it is
// the owner's to compute.
int spillway_channel_wait(void* channel, int64_t number, int64_t patience_ns, float* out, int64_t* span_ns) {
  Channel& c = *(Channel*)channel;
  Slot& slot = c.slot(number);
  const auto low = [&] { return uint32_t(slot.word.load(std::memory_order_acquire)); };
  await(&slot.word, patience_ns, low, [&] {
    const State state = state_of(slot.word.load(std::memory_order_acquire));
    return state != SUBMITTED && state != CLAIMED;
  });
  take(c, slot);
  if (state_of(slot.word.load(std::memory_order_acquire)) != DONE) return 0;
  std::memcpy(out, c.out(number), c.out_floats(slot.rows, slot.front) * 4);
  span_ns[0] = slot.begin_ns, span_ns[1] = slot.end_ns;
  return 1;
}

// Owner: whether the helper has let go of all that was taken from it.
int spillway_channel_ready(const void* channel) {
  const Channel& c = *(const Channel*)channel;
  for (int64_t n = 0; n < c.shape.slots; ++n)
    if (state_of(c.slot(n).word.load(std::memory_order_acquire)) == TAKEN) return 0;
  return !c.header().ended.load();
}

// Owner, from any thread: nothing is handed over from now on, and who waits computes itself.
void spillway_channel_end(void* channel) {
  Channel& c = *(Channel*)channel;
  c.header().ended.store(1);
  for (int64_t n = 0; n < c.shape.slots; ++n) take(c, c.slot(n));
  ring(c);
}

// Helper: attend to what is submitted until the channel ends or `spillway_channel_stop` is called; with `slowdown` it takes
// so many times as long. Returns how many layers were done in time.
int64_t spillway_channel_serve(void* channel, int threads, int slowdown) {
  Channel& c = *(Channel*)channel;
  Header& header = c.header();
  int64_t done = 0;
  const auto over = [&] { return c.stopped.load() || header.ended.load(); };
  while (!over()) {
    const uint32_t rang = header.bell.load(std::memory_order_acquire);
    const int64_t number = next_of(c);
    if (number < 0) {
      const auto low = [&] { return header.bell.load(std::memory_order_acquire); };
      await(&header.bell, NEVER, [&] { return rang; }, [&] { return low() != rang || over(); });
      continue;
    }
    Slot& slot = c.slot(number);
    uint64_t word = slot.word.load(std::memory_order_acquire);
    if (state_of(word) != SUBMITTED || !slot.word.compare_exchange_strong(word, with_state(word, CLAIMED))) continue;
    const int64_t begin_ns = now_ns();
    attend(c, number, threads);
    if (slowdown > 1) {
      const int64_t more_ns = (slowdown - 1) * (now_ns() - begin_ns);
      const timespec more{more_ns / SECOND_NS, more_ns % SECOND_NS};
      nanosleep(&more, nullptr);
    }
    slot.begin_ns = begin_ns, slot.end_ns = now_ns();
    word = with_state(word, CLAIMED);
    if (slot.word.compare_exchange_strong(word, with_state(word, DONE))) {
      futex_wake(&slot.word);
      ++done;
    }
  }
  return done;
}

// Helper, from any thread: `spillway_channel_serve` returns when what it attends to is done.
void spillway_channel_stop(void* channel) {
  Channel& c = *(Channel*)channel;
  c.stopped.store(true);
  ring(c);
}
}
