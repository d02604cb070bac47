// The records of who used which bytes when, and what two uses may be to each other. A use is before another when both are by
// one thread, or when a barrier that both threads took part in lies between: luck in the order of threads plays no part.
#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"
#include "report.h"

// Where the linker put the program.
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));

namespace cuda_on_cpu {
namespace {

/// The latest write, and the reads since; atomic operations leave the plain uses before them. Zero: never used.
struct Record {
  Stamp write_stamp, read_stamp;
  PlaceInCode write_place, read_place;
  uint32_t read_lanes;         // of read_warp
  uint16_t write_thread : 10,  // within the block
      atomic : 1,              // the latest write was an atomic operation
      written_by_lanes : 1,    // and others before it, by lanes of the same warp that are not ordered
      written_by_warps : 1,    // the same, by several warps
      written_by_blocks : 1,   // the same, by an earlier block of the launch
      in_flight : 1,           // an asynchronous copy has not landed
      split : 1;               // of a word: its bytes have records of their own
  uint16_t read_warp : 5,
      read_by_warps : 1,   // unordered, besides read_warp
      read_by_blocks : 1,  // an earlier block of the launch
      read_is_write : 1;   // a plain write before atomic operations, in place of the reads
};

constexpr size_t kWord = 4;

}  // namespace

struct Memory {
  uintptr_t begin;
  size_t bytes;
  std::string name;
  bool initialised, read_only, shared;
  Record* words;  // of four bytes each; most uses are of whole words
  Record* split;  // of single bytes, where a word's record says so
  Traffic traffic;
};

namespace {

constexpr size_t kGap = 64 << 10;  // on both sides of every array: an index a little off hits no other array

void* map(size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const memory = mmap(nullptr, bytes + 2 * kGap, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) std::perror("memory of the device"), std::exit(1);
  return static_cast<char*>(memory) + kGap;
}
void unmap(void* memory, size_t bytes) { munmap(static_cast<char*>(memory) - kGap, bytes + 2 * kGap); }

size_t words_of(size_t bytes) { return (bytes + kWord - 1) / kWord; }

Memory* make_memory(size_t bytes, const char* name) {
  Memory* const memory = new Memory{};
  memory->begin = reinterpret_cast<uintptr_t>(map(bytes));
  memory->bytes = bytes;
  memory->name = name;
  memory->words = static_cast<Record*>(map(words_of(bytes) * sizeof(Record)));
  memory->split = static_cast<Record*>(map(words_of(bytes) * kWord * sizeof(Record)));
  return memory;
}

std::vector<Memory*>& arrays() {
  static std::vector<Memory*> arrays;
  return arrays;
}

Memory& shared_arena() {
  constexpr size_t kLargest = 228 << 10;
  static Memory* const arena = [] {
    Memory* const memory = make_memory(kLargest, "shared memory");
    memory->shared = true;
    return memory;
  }();
  return *arena;
}

bool contains(const Memory& memory, uintptr_t address, size_t bytes) {
  const uintptr_t offset = address - memory.begin;
  return offset < memory.bytes && bytes <= memory.bytes - offset;
}

Memory* find(uintptr_t address, size_t bytes) {
  static Memory& shared = shared_arena();
  if (contains(shared, address, bytes)) return &shared;
  for (Memory* memory : arrays())
    if (contains(*memory, address, bytes)) return memory;
  return nullptr;
}

// --- which uses are before the current thread's

/// No use before this stamp matters: the contents of shared memory end with the block, and launches are in order.
Stamp beginning(const Memory& memory) { return memory.shared ? machine.block.first : machine.launch_start; }

/// Whether the uses of these lanes of a warp until `stamp` are before what the current thread does now.
bool lanes_are_before(Stamp stamp, uint32_t warp_index, uint32_t lanes) {
  const Thread& self = *machine.current;
  const Warp& warp = *self.warp;
  if (stamp < machine.block.start) return true;
  if (warp.index != warp_index) return false;
  if (stamp < warp.start) return true;
  for (lanes &= ~(1u << self.lane); lanes; lanes &= lanes - 1)
    if (stamp >= warp.ordered[self.lane][__builtin_ctz(lanes)]) return false;
  return true;
}

bool reads_are_before(const Memory& memory, const Record& r) {
  if (r.read_stamp < beginning(memory)) return true;
  if (r.read_by_blocks || r.read_stamp < machine.block.first) return false;
  if (r.read_by_warps) return r.read_stamp < machine.block.start;
  return lanes_are_before(r.read_stamp, r.read_warp, r.read_lanes);
}

/// Apart from what earlier blocks did.
bool writes_of_the_block_are_before(const Record& r) {
  if (r.written_by_warps) return r.write_stamp < machine.block.start;
  const uint32_t lanes = r.written_by_lanes ? ~0u : 1u << r.write_thread % kWarpSize;
  return lanes_are_before(r.write_stamp, r.write_thread / kWarpSize, lanes);
}

bool writes_are_before(const Memory& memory, const Record& r) {
  if (r.write_stamp < beginning(memory)) return true;
  if (r.written_by_blocks || r.write_stamp < machine.block.first) return false;
  return writes_of_the_block_are_before(r);
}

// --- reports

struct Where {
  const Memory& memory;
  uintptr_t offset;
  Use use;
  PlaceInCode place;
};

const char* verb(Use use) { return use == Use::kRead ? "reads " : use == Use::kWrite ? "writes " : "atomically changes "; }

std::string described(const Where& where) {
  return std::string(verb(where.use)) + "byte " + std::to_string(where.offset) + " of " + where.memory.name + " at " +
         placeholder(where.place);
}

/// Who used a byte at that time.
std::string user(Stamp stamp, uint32_t thread) {
  if (stamp >= machine.block.first) return text_of(machine.threads[thread]);
  const auto later = [](Stamp s, const StartedBlock& block) { return s < block.first; };
  const auto next = std::upper_bound(machine.blocks.begin(), machine.blocks.end(), stamp, later);
  return "block " + text_of(std::prev(next)->index);
}

/// Why a use at that time is not before the current one.
const char* no_order(Stamp stamp) { return stamp < machine.block.first ? " in this launch" : " with no barrier since"; }

[[noreturn]] void fail_after_write(const Where& where, const Record& r) {
  if (r.written_by_blocks && r.write_stamp >= machine.block.first)
    fail(described(where) + ", but earlier blocks of this launch changed it too");
  fail(described(where) + ", but " + user(r.write_stamp, r.write_thread) +
       (r.atomic ? " changed it atomically at " : " wrote it at ") + placeholder(r.write_place) + no_order(r.write_stamp));
}

[[noreturn]] void fail_after_read(const Where& where, const Record& r) {
  if (r.read_by_blocks && r.read_stamp >= machine.block.first)
    fail(described(where) + ", but earlier blocks of this launch read it");
  const Thread& self = *machine.current;
  uint32_t others = r.read_lanes;
  if (r.read_stamp >= machine.block.first && r.read_warp == self.warp->index) others &= ~(1u << self.lane);
  const std::string other = others ? user(r.read_stamp, r.read_warp * kWarpSize + __builtin_ctz(others)) : "another thread";
  fail(described(where) + ", but " + other + (r.read_is_write ? " wrote it at " : " read it at ") +
       placeholder(r.read_place) + no_order(r.read_stamp));
}

[[noreturn]] void fail_in_flight(const Where& where, const Record& r) {
  fail(described(where) + ", but the copy_async of " + user(r.write_stamp, r.write_thread) + " at " +
       placeholder(r.write_place) + " has not been waited for");
}

[[noreturn]] void fail_outside(uintptr_t address, size_t bytes, Use use, PlaceInCode place) {
  const Memory* nearest = nullptr;
  uintptr_t distance = kGap;
  const auto consider = [&](const Memory& memory) {
    const uintptr_t end = memory.begin + memory.bytes;
    const uintptr_t d = address < memory.begin ? memory.begin - address : address < end ? 0 : address - end;
    if (d < distance) nearest = &memory, distance = d;
  };
  consider(shared_arena());
  for (const Memory* memory : arrays()) consider(*memory);
  std::string text = verb(use) + std::to_string(bytes) + " bytes ";
  if (nearest) {
    const long long offset = static_cast<long long>(address) - static_cast<long long>(nearest->begin);
    text += "at byte " + std::to_string(offset) + " of " + nearest->name + ", which has " + std::to_string(nearest->bytes);
  } else {
    char hexadecimal[32];
    std::snprintf(hexadecimal, sizeof hexadecimal, "%#zx", static_cast<size_t>(address));
    text += std::string("at ") + hexadecimal + ", which is no memory of the device";
  }
  fail(text + ", at " + placeholder(place));
}

// --- one record

void check_write_before(const Where& where, const Record& r) {
  if (r.in_flight && r.write_stamp >= beginning(where.memory)) fail_in_flight(where, r);
  if (!writes_are_before(where.memory, r)) fail_after_write(where, r);
}

void record_read(const Where& where, Record& r) {
  const Thread& self = *machine.current;
  const uint32_t warp = self.warp->index, bit = 1u << self.lane;
  check_write_before(where, r);
  const Stamp since = where.memory.shared ? machine.block.first : where.memory.initialised ? 0 : 1;
  if (r.write_stamp < since) fail(described(where) + ", which nobody wrote");
  const bool in_launch = r.read_stamp >= beginning(where.memory), in_block = r.read_stamp >= machine.block.first;
  r.read_by_blocks = in_launch && (r.read_by_blocks || !in_block);
  const bool join = in_block && (r.read_by_warps ? r.read_stamp >= machine.block.start
                                                 : !lanes_are_before(r.read_stamp, r.read_warp, r.read_lanes));
  r.read_by_warps = join && (r.read_by_warps || r.read_warp != warp);
  r.read_lanes = join && r.read_warp == warp ? r.read_lanes | bit : bit;
  r.read_warp = warp;
  r.read_is_write = false;
  r.read_stamp = machine.clock;
  r.read_place = where.place;
}

/// Other atomic operations need no order with this one, but with the plain uses before it they do: the reads, which are
/// after the write before them, or that write.
void keep_plain_uses(const Where& where, const Record& before, Record& now) {
  const Stamp since = beginning(where.memory);
  if (before.read_stamp >= since) {
    now.read_stamp = before.read_stamp, now.read_place = before.read_place;
    now.read_lanes = before.read_lanes, now.read_warp = before.read_warp;
    now.read_by_warps = before.read_by_warps, now.read_by_blocks = before.read_by_blocks;
    now.read_is_write = before.read_is_write;
  } else if (before.write_stamp >= since && !before.atomic) {
    now.read_stamp = before.write_stamp, now.read_place = before.write_place;
    now.read_lanes = 1u << before.write_thread % kWarpSize, now.read_warp = before.write_thread / kWarpSize;
    now.read_is_write = true;
  }
}

void record_write(const Where& where, Record& r) {
  const bool atomics = where.use == Use::kAtomic && r.atomic && !r.in_flight;
  if (!atomics) check_write_before(where, r);
  if (!reads_are_before(where.memory, r)) fail_after_read(where, r);
  const bool in_launch = r.write_stamp >= beginning(where.memory), in_block = r.write_stamp >= machine.block.first;
  Record now{};
  now.write_stamp = machine.clock;
  now.write_place = where.place;
  now.write_thread = machine.current->index;
  now.atomic = where.use == Use::kAtomic;
  if (atomics) {
    now.written_by_blocks = in_launch && (r.written_by_blocks || !in_block);
    const bool join = in_block && !writes_of_the_block_are_before(r);
    now.written_by_warps = join && (r.written_by_warps || r.write_thread / kWarpSize != machine.current->warp->index);
    now.written_by_lanes = join;
  }
  if (where.use == Use::kAtomic) keep_plain_uses(where, r, now);
  r = now;
}

void record(const Where& where, Record& r) {
  if (where.use == Use::kRead)
    record_read(where, r);
  else
    record_write(where, r);
}

/// f(offset, bytes) for the words that these bytes lie in, and the bytes of each.
template <class F>
void for_words(size_t offset, size_t bytes, F f) {
  for (const size_t end = offset + bytes; offset < end;) {
    const size_t here = std::min(end - offset, kWord - offset % kWord);
    f(offset, here);
    offset += here;
  }
}

/// The records of a word's bytes, which are used from now on.
Record* split_word(const Memory& memory, size_t w) {
  Record& word = memory.words[w];
  Record* const bytes = memory.split + w * kWord;
  if (!word.split) {
    std::fill_n(bytes, kWord, word);
    word.split = true;
  }
  return bytes;
}

/// Some or all bytes of a word.
void record_word(Where where, size_t bytes) {
  Record& word = where.memory.words[where.offset / kWord];
  if (bytes == kWord && !word.split) return record(where, word);
  Record* const records = split_word(where.memory, where.offset / kWord) + where.offset % kWord;
  for (size_t i = 0; i < bytes; ++i, ++where.offset) record(where, records[i]);
  if (bytes == kWord && where.use == Use::kWrite) word = records[0];  // all four the same again
}

bool in_image(uintptr_t address, size_t bytes) {
  return address >= reinterpret_cast<uintptr_t>(__ehdr_start) && address + bytes <= reinterpret_cast<uintptr_t>(_end);
}

bool in_parameters(uintptr_t address, size_t bytes) {
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(machine.parameters);
  return offset < machine.parameter_bytes && bytes <= machine.parameter_bytes - offset;
}

}  // namespace

void use(const void* address, size_t bytes, Use use, PlaceInCode place) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(address);
  Memory* const memory = find(first, bytes);
  if (!memory) {
    // Parameters and constants. The program's variables are not the device's, so writing them is wrong.
    if (use == Use::kRead && (in_parameters(first, bytes) || in_image(first, bytes))) return;
    fail_outside(first, bytes, use, place);
  }
  const Where where{*memory, first - memory->begin, use, place};
  if (use != Use::kRead && memory->read_only) fail(described(where) + ", which is read-only");
  (use == Use::kRead ? memory->traffic.read : memory->traffic.written) += bytes;
  for_words(where.offset, bytes, [&](size_t at, size_t here) { record_word({*memory, at, use, place}, here); });
}

// --- shared memory and asynchronous copies to it

void* shared_memory() { return reinterpret_cast<void*>(shared_arena().begin); }
void set_shared_memory(size_t bytes) { shared_arena().bytes = bytes; }
bool in_shared_memory(const void* address) { return contains(shared_arena(), reinterpret_cast<uintptr_t>(address), 1); }

namespace {
/// The records of what a copy writes: whole words, not split since then.
template <class F>
void for_target(const AsyncCopy& copy, F f) {
  const size_t first = (reinterpret_cast<uintptr_t>(copy.to) - shared_arena().begin) / kWord;
  std::for_each_n(shared_arena().words + first, copy.bytes / kWord, f);
}
}  // namespace

void start_copy(const AsyncCopy& copy) {
  use(copy.to, copy.bytes, Use::kWrite, copy.place);
  for_target(copy, [](Record& word) { word.in_flight = true; });
}

void land_copy(const AsyncCopy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  for_target(copy, [](Record& word) { word.in_flight = false, word.write_stamp = machine.clock; });
}

// --- arrays

Memory* allocate(size_t bytes, const char* name, bool initialised, Access access) {
  Memory* const memory = make_memory(bytes, name);
  memory->initialised = initialised;
  memory->read_only = access == Access::kReadOnly;
  arrays().push_back(memory);
  return memory;
}

void release(Memory* memory) {
  arrays().erase(std::find(arrays().begin(), arrays().end(), memory));
  unmap(reinterpret_cast<void*>(memory->begin), memory->bytes);
  unmap(memory->words, words_of(memory->bytes) * sizeof(Record));
  unmap(memory->split, words_of(memory->bytes) * kWord * sizeof(Record));
  delete memory;
}

void* address(const Memory* memory) { return reinterpret_cast<void*>(memory->begin); }
Traffic traffic(const Memory* memory) { return memory->traffic; }

size_t count_unwritten(const Memory* memory) {
  if (memory->initialised) return 0;
  size_t unwritten = 0;
  for (size_t i = 0; i < memory->bytes; ++i) {
    const Record& word = memory->words[i / kWord];
    unwritten += !(word.split ? memory->split[i] : word).write_stamp;
  }
  return unwritten;
}

Traffic traffic() {
  Traffic sum;
  for (const Memory* memory : arrays()) sum.read += memory->traffic.read, sum.written += memory->traffic.written;
  return sum;
}

void reset_traffic() {
  for (Memory* memory : arrays()) memory->traffic = {};
}

bool host_reads(const void* address, size_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(address);
  return find(first, bytes) || !find(first, 0);
}

bool host_writes(const void* address, size_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(address);
  Memory* const memory = find(first, bytes);
  if (!memory) return !find(first, 0);
  if (memory->read_only) return false;
  Record written{};
  written.write_stamp = machine.clock;
  for_words(first - memory->begin, bytes, [&](size_t at, size_t here) {
    if (here == kWord)
      memory->words[at / kWord] = written;
    else
      std::fill_n(split_word(*memory, at / kWord) + at % kWord, here, written);
  });
  return true;
}

}  // namespace cuda_on_cpu
