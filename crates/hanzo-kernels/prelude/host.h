// Host: the words of kernel-C as C++17, for running a kernel on the CPU in tests. Every thread of a workgroup is a fiber; BARRIER and
// the wave words are where fibers wait for each other. What a GPU would leave undefined is a fault with a message here: an access out
// of bounds or unaligned, a race on shared or on global memory, a barrier or a wave word that not all threads reach, a shift by 32.
// Workgroups run one after another on one CPU thread, in the order that the harness asks for. Nothing that makes a faulty kernel pass may enter.
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint32_t u32;
typedef int32_t i32;
typedef float f32;
struct u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };
struct alignas(16) f32x4 { f32 x, y, z, w; };

static_assert(WAVE >= 1u && WAVE <= 128u && (WAVE & (WAVE - 1u)) == 0u, "WAVE is a power of two up to 128");
static_assert(THREADS % WAVE == 0u && THREADS <= 1024u, "a workgroup is whole waves, 1024 threads at most");

static void hz_kernel();
extern "C" void hz_switch(void** save, void* to) __attribute__((visibility("hidden")));

#if defined(__x86_64__)
asm(".text\n.hidden hz_switch\n.globl hz_switch\n.type hz_switch,@function\nhz_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size hz_switch,.-hz_switch\n");
#elif defined(__aarch64__)
asm(".text\n.hidden hz_switch\n.globl hz_switch\n.type hz_switch,%function\nhz_switch:\n"
    "sub sp,sp,#160\n"
    "stp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\n"
    "stp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\n"
    "mov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\n"
    "ldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#160\nret\n.size hz_switch,.-hz_switch\n");
#else
#error "the host prelude switches fibers on x86-64 and aarch64 only"
#endif

namespace hz {
// ---- the machine: fibers, waves, barriers ----
enum State { READY, AT_BARRIER, AT_WAVE, DONE };
enum WaveOp { SUM, MAX, SUM_I, XOR };
struct Fiber {
  void* sp;
  State state;
  u32 thread, lane, wave;
  int line;           // where it waits
  WaveOp op;          // at a wave word: which, its operand, and the result
  u32 mask, value, result;
  u32 fence;          // the epoch of its last FENCE
  bool unfenced;      // has stored by CSTF or CSTF4 since then
};
struct Buffer { unsigned char* base; uint64_t bytes; uint64_t writable; };  // also known to the harness
struct Shadow { u32 writer, reader; };                                      // of a word of a writable buffer: global thread + 1, 0 none, ~0 several

static const size_t STACK = 128 * 1024;
static Fiber fibers[THREADS];
static Fiber* now;
static void* home;
static unsigned char* stacks;
static u32 group_x, group_y, group_z;
static u32 atomic_epoch; // of the workgroup's last ATOMIC_ADD
static u32 epoch;        // counts barriers, never repeats: an access belongs to one
static uint64_t global_group;
static char* message;
static size_t message_bytes;
static bool failed;
static const Buffer* buffers;
static Shadow** shadows;
static u32 n_buffers;
static const unsigned char* arguments;
static u32 argument_bytes;

static void report(const char* format, va_list rest) {
  size_t n = 0;
  if (now) n = (size_t)snprintf(message, message_bytes, "%s: thread %u of workgroup (%u, %u, %u): ", HZ_NAME, now->thread, group_x, group_y, group_z);
  else n = (size_t)snprintf(message, message_bytes, "%s: ", HZ_NAME);
  if (n < message_bytes) vsnprintf(message + n, message_bytes - n, format, rest);
  failed = true;
}
// From a fiber: it never runs again. The scheduler uses `give_up` and returns.
[[noreturn]] static void fault(const char* format, ...) __attribute__((format(printf, 1, 2), cold, noinline));
static void fault(const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  report(format, rest);
  va_end(rest);
  void* dead;
  hz_switch(&dead, home);
  abort();
}
static void give_up(const char* format, ...) __attribute__((format(printf, 1, 2), cold, noinline));
static void give_up(const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  report(format, rest);
  va_end(rest);
}

static void wait() { hz_switch(&now->sp, home); }
static inline void barrier(int line) {
  now->state = AT_BARRIER;
  now->line = line;
  wait();
}
static inline u32 wave_word(WaveOp op, u32 value, u32 mask, int line) {
  now->state = AT_WAVE;
  now->op = op;
  now->value = value;
  now->mask = mask;
  now->line = line;
  wait();
  return now->result;
}
static void fiber_main() {
  hz_kernel();
  now->state = DONE;
  wait();
  abort();
}
static void start(u32 thread) {
  Fiber& f = fibers[thread];
  f.state = READY;
  f.thread = thread;
  f.lane = thread % WAVE;
  f.wave = thread / WAVE;
  f.fence = 0;
  f.unfenced = false;
  void** top = (void**)(stacks + STACK * (thread + 1));
#if defined(__x86_64__)
  *--top = nullptr;                 // keeps the stack at 8 modulo 16 on entry, as after a call
  *--top = (void*)fiber_main;
  for (int i = 0; i < 6; i++) *--top = nullptr;
#else
  top -= 20;
  memset(top, 0, 160);
  top[11] = (void*)fiber_main;      // x30
#endif
  f.sp = top;
}
static f32 float_of(u32 bits) { f32 v; memcpy(&v, &bits, 4); return v; }
static u32 bits_of(f32 v) { u32 bits; memcpy(&bits, &v, 4); return bits; }

// All lanes of a wave wait at the same wave word: give each its result. Sums go by the butterfly that the GPU preludes use.
static void answer(Fiber* lanes) {
  u32 v[WAVE], next[WAVE];
  for (u32 i = 0; i < WAVE; i++) v[i] = lanes[i].value;
  if (lanes[0].op == XOR) {
    for (u32 i = 0; i < WAVE; i++) {
      now = &lanes[i];
      u32 from = i ^ lanes[i].mask;
      if (from >= WAVE) return give_up("line %d: wave_xor with lane %u of a wave of %u", lanes[i].line, from, WAVE);
      next[i] = v[from];
    }
    memcpy(v, next, sizeof v);
  } else {
    for (u32 m = WAVE / 2; m > 0; m /= 2) {
      for (u32 i = 0; i < WAVE; i++) {
        u32 a = v[i], b = v[i ^ m];
        if (lanes[0].op == SUM) next[i] = bits_of(float_of(a) + float_of(b));
        else if (lanes[0].op == MAX) next[i] = bits_of(fmaxf(float_of(a), float_of(b)));
        else next[i] = a + b;
      }
      memcpy(v, next, sizeof v);
    }
  }
  for (u32 i = 0; i < WAVE; i++) {
    lanes[i].result = v[i];
    lanes[i].state = READY;
  }
}
static const char* doing(const Fiber& f, char* text) {
  const char* words[] = {"wave_sum", "wave_max", "wave_sum_i", "wave_xor"};
  if (f.state == DONE) snprintf(text, 64, "has returned");
  else if (f.state == AT_BARRIER) snprintf(text, 64, "waits at the BARRIER of line %d", f.line);
  else snprintf(text, 64, "waits at the %s of line %d", words[f.op], f.line);
  return text;
}
static void diverged(Fiber& a, Fiber& b, const char* what) {
  char one[64], other[64];
  now = &a;
  give_up("%s: it %s, thread %u %s", what, doing(a, one), b.thread, doing(b, other));
}
// Runs a wave until its lanes are all at a barrier or done.
static void run_wave(Fiber* lanes) {
  for (;;) {
    for (u32 i = 0; i < WAVE; i++) {
      if (lanes[i].state != READY) continue;
      now = &lanes[i];
      hz_switch(&home, now->sp);
      if (failed) return;
    }
    u32 words = 0;
    for (u32 i = 0; i < WAVE; i++) words += lanes[i].state == AT_WAVE;
    if (words == 0) return;
    for (u32 i = 0; i < WAVE; i++) {
      if (lanes[i].state != AT_WAVE || lanes[i].op != lanes[0].op || lanes[i].line != lanes[0].line) return diverged(lanes[0], lanes[i], "a wave diverged");
    }
    answer(lanes);
    if (failed) return;
  }
}
static uint64_t common(uint64_t a, uint64_t b) { return b == 0 ? a : common(b, a % b); }
static void poison_shared();
static void run_group() {
  poison_shared();
  epoch++;
  atomic_epoch = 0;
  for (u32 t = 0; t < THREADS; t++) start(t);
  for (;;) {
    for (u32 w = 0; w < THREADS / WAVE; w++) {
      run_wave(fibers + w * WAVE);
      if (failed) return;
    }
    for (u32 t = 1; t < THREADS; t++) {
      if (fibers[t].state != fibers[0].state || (fibers[t].state == AT_BARRIER && fibers[t].line != fibers[0].line))
        return diverged(fibers[0], fibers[t], "a workgroup diverged");
    }
    if (fibers[0].state == DONE) return;
    epoch++;
    for (u32 t = 0; t < THREADS; t++) fibers[t].state = READY;
  }
}

// ---- pointers ----
struct Pointer {
  const unsigned char* at;
  uint64_t bytes;        // from `at` to the end of what it may touch
  const char* name;
  Shadow* shadow;        // of the word at `at`, if the buffer is writable
};
static Shadow* shadow_of(const Pointer& p, uint64_t offset) { return p.shadow ? p.shadow + offset / 4 : nullptr; }
static u32 me() { return (u32)(global_group * THREADS + now->thread + 1); }
static inline void check(const Pointer& p, uint64_t i, u32 size, const char* word) {
  uint64_t offset = i * size;
  if (__builtin_expect(offset + size > p.bytes, 0))
    fault("%s of `%s` at element %llu is out of bounds: %llu bytes are there", word, p.name, (unsigned long long)i, (unsigned long long)p.bytes);
  if (__builtin_expect(((uintptr_t)(p.at + offset) & (size - 1)) != 0, 0))
    fault("%s of `%s` at element %llu is not aligned to %u bytes", word, p.name, (unsigned long long)i, size);
}
static inline const unsigned char* read(const Pointer& p, u32 i, u32 size, const char* word) {
  check(p, i, size, word);
  if (Shadow* s = shadow_of(p, (uint64_t)i * size)) {
    for (u32 k = 0; k < size / 4; k++) {
      if (s[k].writer != 0 && s[k].writer != me())
        fault("%s of `%s` at element %u races: another thread wrote it in this launch", word, p.name, i);
      s[k].reader = s[k].reader == 0 || s[k].reader == me() ? me() : ~0u;
    }
  }
  return p.at + (uint64_t)i * size;
}
static inline unsigned char* write(const Pointer& p, u32 i, u32 size, const char* word) {
  check(p, i, size, word);
  if (Shadow* s = shadow_of(p, (uint64_t)i * size)) {
    for (u32 k = 0; k < size / 4; k++) {
      if ((s[k].writer != 0 && s[k].writer != me()) || (s[k].reader != 0 && s[k].reader != me()))
        fault("%s of `%s` at element %u races: another thread %s it in this launch", word, p.name, i, s[k].writer != 0 && s[k].writer != me() ? "wrote" : "read");
      s[k].writer = me();
    }
  }
  return const_cast<unsigned char*>(p.at) + (uint64_t)i * size;
}
template <class T> static inline T load(const Pointer& p, u32 i, const char* word) {
  T v;
  memcpy(&v, read(p, i, sizeof(T), word), sizeof(T));
  return v;
}
// What another workgroup of the launch stored: seen for certain only behind a FENCE that comes after the ATOMIC_ADD that told of it and the
// barrier that passed that on.
template <class T> static inline T load_coherent(const Pointer& p, u32 i, const char* word) {
  check(p, i, sizeof(T), word);
  Shadow* s = shadow_of(p, (uint64_t)i * sizeof(T));
  for (u32 k = 0; s && k < sizeof(T) / 4; k++) {
    if (s[k].writer != 0 && s[k].writer != me() && (atomic_epoch == 0 || now->fence <= atomic_epoch))
      fault("%s of `%s` at element %u races: another thread wrote it, and no FENCE stands between its ATOMIC_ADD and this", word, p.name, i);
    s[k].reader = s[k].reader == 0 || s[k].reader == me() ? me() : ~0u;
  }
  T v;
  memcpy(&v, p.at + (uint64_t)i * sizeof(T), sizeof(T));
  return v;
}
template <class T> static inline void store(const Pointer& p, u32 i, T v, const char* word) { memcpy(write(p, i, sizeof(T), word), &v, sizeof(T)); }
}  // namespace hz

struct RO { hz::Pointer ptr; };
struct RW { hz::Pointer ptr; bool readable; };
struct Wt { RO p0, p1, p2, p3, tab; };
struct Unit { u32x4 lo; u32x4 hi; f32 s0; f32 s1; f32 m0; f32 m1; };
struct Floats { f32x4 v0; f32x4 v1; f32x4 v2; f32x4 v3; f32x4 v4; f32x4 v5; f32x4 v6; f32x4 v7; };

namespace hz {
static Pointer resolve(const char* name, uint64_t address, bool writes) {
  if (address == 0) return Pointer{nullptr, 0, name, nullptr};
  for (u32 b = 0; b < n_buffers; b++) {
    uint64_t base = (uint64_t)(uintptr_t)buffers[b].base;
    if (address < base || address - base > buffers[b].bytes || (address - base == buffers[b].bytes && buffers[b].bytes != 0)) continue;
    if (writes && !buffers[b].writable) fault("`%s` points to a buffer that is read-only", name);
    if (address % 16 != 0) fault("`%s` is not aligned to 16 bytes", name);
    return Pointer{(const unsigned char*)(uintptr_t)address, base + buffers[b].bytes - address, name, shadows[b] ? shadows[b] + (address - base) / 4 : nullptr};
  }
  fault("`%s` points into no buffer of the launch", name);
}
template <class T> static T arg(u32 offset) {
  if (offset + sizeof(T) > argument_bytes) fault("the launch passes %u bytes of arguments: none at %u", argument_bytes, offset);
  T v;
  memcpy(&v, arguments + offset, sizeof v);
  return v;
}
static RO ro(const char* name, u32 offset) { return RO{resolve(name, arg<uint64_t>(offset), false)}; }
static RW rw(const char* name, u32 offset) { return RW{resolve(name, arg<uint64_t>(offset), true), true}; }
static RW wo(const char* name, u32 offset) { return RW{resolve(name, arg<uint64_t>(offset), true), false}; }
// Each plane ends where the next one starts, so that reading past a plane is a fault.
static Wt weight(const char* name, u32 offset) {
  Pointer base = resolve(name, arg<uint64_t>(offset), false);
  uint64_t starts[5] = {0, 0, 0, 0, base.bytes};
  for (u32 k = 1; k < 4; k++) starts[k] = 16ull * arg<u32>(offset + 4 + 4 * k);
  RO planes[4];
  for (u32 k = 0; k < 4; k++) {
    planes[k].ptr = Pointer{base.at, 0, name, nullptr};
    if (k > 0 && starts[k] == 0) continue;
    uint64_t end = base.bytes;
    for (u32 j = k + 1; j < 4; j++) if (starts[j] > starts[k] && starts[j] < end) end = starts[j];
    if (starts[k] > base.bytes) fault("plane %u of `%s` starts behind the end of its buffer", k, name);
    planes[k].ptr = Pointer{base.at + starts[k], end - starts[k], name, base.shadow ? base.shadow + starts[k] / 4 : nullptr};
  }
  return Wt{planes[0], planes[1], planes[2], planes[3], RO{resolve("the codebook", arg<uint64_t>(offset + 24), false)}};
}
template <class T> static inline T load(const RO& p, u32 i, const char* word) { return load<T>(p.ptr, i, word); }
template <class T> static inline T load(const RW& p, u32 i, const char* word) {
  if (!p.readable) fault("%s of `%s`, which is declared `wo`", word, p.ptr.name);
  return load<T>(p.ptr, i, word);
}

// ---- workgroup memory ----
struct Touched { u32 write_epoch, writer, read_epoch, reader; };
struct Array {
  Array* next;
  void* data;
  size_t bytes;
};
static Array* arrays;
static void poison(const Array& a) { for (size_t i = 0; i + 4 <= a.bytes; i += 4) memcpy((char*)a.data + i, "\xad\xde\xc0\x7f", 4); }
static void poison_shared() { for (Array* a = arrays; a; a = a->next) poison(*a); }

template <class T> struct Cell {           // one element, or one member of one
  T* at;
  Touched* touched;
  const char* name;
  u32 index;
  T get() const {
    if (touched->write_epoch == epoch && touched->writer != now->thread)
      fault("a read of `%s[%u]` races: thread %u wrote it since the last barrier", name, index, touched->writer);
    touched->reader = touched->read_epoch == epoch && touched->reader != now->thread ? ~0u : now->thread;
    touched->read_epoch = epoch;
    return *at;
  }
  void put(const T& v) const {
    if (touched->write_epoch == epoch && touched->writer != now->thread)
      fault("a write of `%s[%u]` races: thread %u wrote it since the last barrier", name, index, touched->writer);
    if (touched->read_epoch == epoch && touched->reader != now->thread)
      fault("a write of `%s[%u]` races: another thread read it since the last barrier", name, index);
    touched->write_epoch = epoch;
    touched->writer = now->thread;
    *at = v;
  }
};
template <class T> struct Ref {
  Cell<T> c;
  operator T() const { return c.get(); }
  Ref& operator=(const T& v) { c.put(v); return *this; }
  Ref& operator=(const Ref& o) { c.put(o.c.get()); return *this; }
  Ref(const Cell<T>& cell) : c(cell) {}
  Ref(const Ref&) = default;
  Ref& operator+=(T v) { c.put(c.get() + v); return *this; }
  Ref& operator-=(T v) { c.put(c.get() - v); return *this; }
  Ref& operator*=(T v) { c.put(c.get() * v); return *this; }
  Ref& operator|=(T v) { c.put(c.get() | v); return *this; }
  Ref& operator&=(T v) { c.put(c.get() & v); return *this; }
  Ref& operator^=(T v) { c.put(c.get() ^ v); return *this; }
};
template <class V, class T> struct Ref4 {
  Cell<V> c;
  Ref<T> x, y, z, w;
  Ref4(const Cell<V>& cell) : c(cell), x(part(cell, &cell.at->x)), y(part(cell, &cell.at->y)), z(part(cell, &cell.at->z)), w(part(cell, &cell.at->w)) {}
  Ref4(const Ref4&) = default;
  static Cell<T> part(const Cell<V>& cell, T* at) { return Cell<T>{at, cell.touched, cell.name, cell.index}; }
  operator V() const { return c.get(); }
  Ref4& operator=(const V& v) { c.put(v); return *this; }
  Ref4& operator=(const Ref4& o) { c.put(o.c.get()); return *this; }
};
template <> struct Ref<u32x4> : Ref4<u32x4, u32> { using Ref4<u32x4, u32>::Ref4; using Ref4<u32x4, u32>::operator=; };
template <> struct Ref<f32x4> : Ref4<f32x4, f32> { using Ref4<f32x4, f32>::Ref4; using Ref4<f32x4, f32>::operator=; };
template <> struct Ref<u32x2> {
  Cell<u32x2> c;
  Ref<u32> x, y;
  Ref(const Cell<u32x2>& cell) : c(cell), x(Cell<u32>{&cell.at->x, cell.touched, cell.name, cell.index}), y(Cell<u32>{&cell.at->y, cell.touched, cell.name, cell.index}) {}
  Ref(const Ref&) = default;
  operator u32x2() const { return c.get(); }
  Ref& operator=(const u32x2& v) { c.put(v); return *this; }
  Ref& operator=(const Ref& o) { c.put(o.c.get()); return *this; }
};
template <class T, u32 N> struct Shared {
  T data[N];
  Touched touched[N];
  const char* name;
  Array entry;
  explicit Shared(const char* its_name) : name(its_name) {
    memset(touched, 0, sizeof touched);
    entry = Array{arrays, data, sizeof data};
    arrays = &entry;
    poison(entry);
  }
  Ref<T> operator[](u32 i) {
    if (i >= N) fault("`%s[%u]` is out of bounds: it has %u elements", name, i, N);
    return Ref<T>(Cell<T>{data + i, touched + i, name, i});
  }
  Ref<T> operator[](i32 i) { return (*this)[(u32)i]; }
};
}  // namespace hz

// ---- the words ----
#define FN static inline
#define CONST static constexpr
#define UNROLL
#define THREAD (hz::now->thread)
#define LANE (hz::now->lane)
#define WAVE_ID (hz::now->wave)
#define GROUP_X hz::group_x
#define GROUP_Y hz::group_y
#define GROUP_Z hz::group_z
#define BARRIER hz::barrier(__LINE__)

#define LD1(p_, i_) hz::load<u32>(hz::only_ro(p_), i_, "LD1")
#define LD2(p_, i_) hz::load<hz::Pair>(hz::only_ro(p_), i_, "LD2").v
#define LD4(p_, i_) hz::load<u32x4>(hz::only_ro(p_), i_, "LD4")
#define LDF(p_, i_) hz::load<f32>(hz::only_ro(p_), i_, "LDF")
#define LDF4(p_, i_) hz::load<f32x4>(hz::only_ro(p_), i_, "LDF4")
#define RW1(p_, i_) hz::load<u32>(hz::only_rw(p_), i_, "RW1")
#define RWF(p_, i_) hz::load<f32>(hz::only_rw(p_), i_, "RWF")
#define ST1(p_, i_, v_) hz::store<u32>(hz::only_rw(p_).ptr, i_, v_, "ST1")
#define ST2(p_, i_, v_) hz::store<hz::Pair>(hz::only_rw(p_).ptr, i_, hz::Pair{v_}, "ST2")
#define ST4(p_, i_, v_) hz::store<u32x4>(hz::only_rw(p_).ptr, i_, v_, "ST4")
#define STF(p_, i_, v_) hz::store<f32>(hz::only_rw(p_).ptr, i_, v_, "STF")
#define STF4(p_, i_, v_) hz::store<f32x4>(hz::only_rw(p_).ptr, i_, v_, "STF4")
#define FENCE (hz::now->fence = hz::epoch, hz::now->unfenced = false)
#define CLDF(p_, i_) hz::load_coherent<f32>(hz::only_rw(p_).ptr, i_, "CLDF")
#define CLDF4(p_, i_) hz::load_coherent<f32x4>(hz::only_rw(p_).ptr, i_, "CLDF4")
#define CSTF(p_, i_, v_) (hz::store<f32>(hz::only_rw(p_).ptr, i_, v_, "CSTF"), (void)(hz::now->unfenced = true))
#define CSTF4(p_, i_, v_) (hz::store<f32x4>(hz::only_rw(p_).ptr, i_, v_, "CSTF4"), (void)(hz::now->unfenced = true))
namespace hz {
struct alignas(8) Pair { u32x2 v; };
static inline const RO& only_ro(const RO& p) { return p; }
static inline const RW& only_rw(const RW& p) { return p; }
}  // namespace hz
FN RO ADV(RO p, u32 n) {
  uint64_t bytes = 16ull * n;
  return RO{hz::Pointer{p.ptr.at + bytes, bytes > p.ptr.bytes ? 0 : p.ptr.bytes - bytes, p.ptr.name, p.ptr.shadow ? p.ptr.shadow + bytes / 4 : nullptr}};
}
// Atomics do not race with each other; they leave no trace in the shadow, so that a plain access beside them is not seen.
FN u32 ATOMIC_ADD(RW p, u32 i, u32 v) {
  hz::check(p.ptr, i, 4, "ATOMIC_ADD");
  for (u32 t = 0; t < THREADS; t++)
    if (hz::fibers[t].unfenced) hz::fault("ATOMIC_ADD of `%s` before a FENCE of thread %u, which stored by CSTF or CSTF4", p.ptr.name, t);
  hz::atomic_epoch = hz::epoch;
  unsigned char* at = const_cast<unsigned char*>(p.ptr.at) + 4ull * i;
  u32 old, sum;
  memcpy(&old, at, 4);
  sum = old + v;
  memcpy(at, &sum, 4);
  return old;
}
FN u32x2 mk2(u32 a, u32 b) { return u32x2{a, b}; }
FN u32x4 mk4(u32 a, u32 b, u32 c, u32 d) { return u32x4{a, b, c, d}; }
FN f32x4 mkf4(f32 a, f32 b, f32 c, f32 d) { return f32x4{a, b, c, d}; }
FN f32 as_f32(u32 x) { return hz::float_of(x); }
FN u32 as_u32(f32 x) { return hz::bits_of(x); }
FN u32 as_u32(i32 x) { return (u32)x; }
FN i32 as_i32(u32 x) { return (i32)x; }
#define wave_sum(x_) as_f32(hz::wave_word(hz::SUM, as_u32(x_), 0u, __LINE__))
#define wave_max(x_) as_f32(hz::wave_word(hz::MAX, as_u32(x_), 0u, __LINE__))
#define wave_sum_i(x_) ((i32)hz::wave_word(hz::SUM_I, (u32)hz::only_i32(x_), 0u, __LINE__))
#define wave_xor(x_, m_) as_f32(hz::wave_word(hz::XOR, as_u32(x_), m_, __LINE__))
namespace hz { static inline i32 only_i32(i32 x) { return x; } }
FN i32 dp4a(u32 a, u32 b, i32 c) {
  u32 sum = (u32)c;
  for (u32 k = 0u; k < 4u; k++) sum += (u32)((i32)(int8_t)(a >> (8u * k)) * (i32)(int8_t)(b >> (8u * k)));
  return (i32)sum;
}
FN f32 f16_to_f32(u32 h) {
  u32 sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31u) return as_f32(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0u) return as_f32(sign | as_u32((f32)mantissa * 0x1p-24f));
  return as_f32(sign | (exponent + 112u) << 23 | mantissa << 13);
}
FN u32 f32_to_f16(f32 x) {
  u32 bits = as_u32(x), sign = (bits >> 16) & 0x8000u, a = bits & 0x7fffffffu;
  if (a > 0x7f800000u) return sign | 0x7e00u | (a >> 13 & 0x3ffu);
  if (a >= 0x477ff000u) return sign | 0x7c00u;                        // 65520 rounds up to infinity
  if (a < 0x38800000u) return sign | (u32)rintf(as_f32(a) * 0x1p24f);  // subnormal: the product is exact
  u32 low = a & 0x1fffu, up = low > 0x1000u || (low == 0x1000u && (a & 0x2000u)) ? 1u : 0u;
  return sign | (((a - 0x38000000u) >> 13) + up);
}
FN f32 mul_rn(f32 a, f32 b) { return a * b; }
FN f32 sqrt_rn(f32 x) { return sqrtf(x); }
FN f32 fma_(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
FN f32 rint_(f32 x) { return rintf(x); }
FN f32 floor_(f32 x) { return floorf(x); }
FN f32 abs_(f32 x) { return fabsf(x); }
FN f32 min_(f32 a, f32 b) { return fminf(a, b); }
FN f32 max_(f32 a, f32 b) { return fmaxf(a, b); }
FN u32 min_(u32 a, u32 b) { return a < b ? a : b; }
FN u32 max_(u32 a, u32 b) { return a > b ? a : b; }
FN i32 min_(i32 a, i32 b) { return a < b ? a : b; }
FN i32 max_(i32 a, i32 b) { return a > b ? a : b; }
FN u32 popc(u32 x) { return (u32)__builtin_popcount(x); }
FN u32 prmt(u32 lo, u32 hi, u32 sel) {
  uint64_t both = (uint64_t)hi << 32 | lo;
  u32 r = 0u;
  for (u32 k = 0u; k < 4u; k++) r |= (u32)(both >> (8u * (sel >> (4u * k) & 7u)) & 255u) << (8u * k);
  return r;
}
#ifdef HZ_TABLE_WORDS
#if HZ_GRID
static hz::Shared<u32, HZ_TABLE_WORDS> hz_grid("the codebook");
FN u32 GRID(Wt, u32 i) { return hz_grid[i]; }
#define HZ_GRID_LOAD(w_) do { for (u32 hz_i = THREAD; hz_i < HZ_TABLE_WORDS; hz_i += THREADS) hz_grid[hz_i] = LD1((w_).tab, hz_i); BARRIER; } while (0)
#else
FN u32 GRID(Wt w, u32 i) { return LD1(w.tab, i); }
#endif
#endif

// ---- what the compiler's checks report (shifts, local arrays, divisions, casts) ----
namespace hz {
struct Place { const char* file; u32 line, column; };
}
#define HZ_CHECK(name, what, ...) extern "C" __attribute__((used)) void name(void* place, ##__VA_ARGS__) { hz::fault("line %u: " what, ((hz::Place*)place)->line); }
HZ_CHECK(__ubsan_handle_shift_out_of_bounds, "a shift by 32 bits or more", void*, void*)
HZ_CHECK(__ubsan_handle_out_of_bounds, "an index outside of a local array", void*)
HZ_CHECK(__ubsan_handle_divrem_overflow, "an integer division by zero", void*, void*)
HZ_CHECK(__ubsan_handle_float_cast_overflow, "a float outside of the integer type that it is converted to", void*)

// Runs the kernel over a grid, groups[3] being the order of workgroups (0: as they are counted; 1: backwards; else shuffled): 0, or 1 with a message of what went wrong first.
extern "C" __attribute__((visibility("default"))) int hz_run(const hz::Buffer* bufs, u32 n_bufs, const unsigned char* args, u32 n_args, const u32* groups, char* text, size_t text_bytes) {
  using namespace hz;
  if (!stacks) {
    void* m = mmap(nullptr, STACK * THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) { snprintf(text, text_bytes, "%s: no memory for stacks", HZ_NAME); return 1; }
    stacks = (unsigned char*)m;
    for (u32 t = 0; t < THREADS; t++) mprotect(stacks + STACK * t, 4096, PROT_NONE);
  }
  buffers = bufs; n_buffers = n_bufs; arguments = args; argument_bytes = n_args; message = text; message_bytes = text_bytes;
  failed = false;
  now = nullptr;
  shadows = (Shadow**)calloc(n_bufs ? n_bufs : 1, sizeof(Shadow*));
  for (u32 b = 0; b < n_bufs; b++) if (bufs[b].writable) shadows[b] = (Shadow*)calloc(bufs[b].bytes / 4 + 4, sizeof(Shadow));
  uint64_t count = (uint64_t)groups[0] * groups[1] * groups[2], stride = 1;
  // A stride that shares no factor with the count visits all.
  if (groups[3] > 1) {
    stride = count * 5 / 8 + groups[3];
    while (common(stride, count) != 1) stride++;
  }
  for (uint64_t i = 0; i < count && !failed; i++) {
    global_group = groups[3] == 1 ? count - 1 - i : (i * stride + groups[3]) % count;
    if (groups[3] == 0) global_group = i;
    group_x = (u32)(global_group % groups[0]);
    group_y = (u32)(global_group / groups[0] % groups[1]);
    group_z = (u32)(global_group / groups[0] / groups[1]);
    run_group();
  }
  for (u32 b = 0; b < n_bufs; b++) free(shadows[b]);
  free(shadows);
  // Not kept: a guard page a thread adds up to more mappings than a process may have.
  munmap(stacks, STACK * THREADS);
  stacks = nullptr;
  return failed ? 1 : 0;
}
