// Memory that the ranks of one host share: a stop word, a board, a ring of orders, and places for parts of sums.
//
// Every word that two ranks use is an atomic, stored with release and loaded with acquire: what was written before a
// store is there after the load that sees it, on any processor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace gapless {

constexpr int64_t kRingBytes = 4 << 20, kMostFrame = kRingBytes / 2, kSlotBytes = 1 << 20;
constexpr int kMostRanks = 64;
constexpr size_t kLine = 128;  // two cache lines: processors fetch them in pairs

// gapless.comm.shared.BoardLine. `taken` to `state` are written by the rank's host, the others here.
struct alignas(kLine) BoardLine {
  std::atomic<uint64_t> pulse, taken, launched, ended, state, spare[3];
  std::atomic<uint64_t> waited, waiting_since, calls;
};
static_assert(sizeof(BoardLine) == kLine);

enum Kind : uint32_t { FLOAT, BFLOAT16, HALF, LONG, WORD };
enum class What : uint32_t { ADD = 1, ADD_NORM, GATHER, TELL };

// Describes a rank's part of a call. All but `nbytes` of a gather are equal for all ranks.
struct Tag {
  What what;
  Kind kind;
  int64_t rows, nbytes;
};

// One rank's place in the calls: how many it has begun, on which core it was then, and their tags by parity.
struct alignas(kLine) Place {
  std::atomic<uint32_t> begun;
  std::atomic<uint32_t> sleepers;
  std::atomic<int32_t> core;
  Tag tags[2];
};

struct alignas(kLine) Cursor {
  std::atomic<uint64_t> at;
};

// A ring of frames for one writer. Positions only grow; a frame is eight bytes with its length, then its bytes, and
// ends at a multiple of eight. No frame wraps around: a length of kSkip leads to the ring's begin.
struct alignas(kLine) Ring {
  std::atomic<uint64_t> head;
  alignas(kLine) std::atomic<uint32_t> sleepers;
};
constexpr uint64_t kSkip = ~uint64_t{0};

struct alignas(kLine) Head {
  uint64_t magic;
  uint32_t world;
  alignas(64) std::atomic<uint32_t> stopped;
};
static_assert(offsetof(Head, stopped) == 64, "gapless.comm.shared.STOP_AT");
static_assert(offsetof(BoardLine, waited) == 64, "gapless.comm.shared.WAITED_AT");

// This process's view of the memory: of one rank.
class Commons {
 public:
  // Maps the file `fd`. Throws std::runtime_error if it is not a file of `world` ranks.
  Commons(int fd, int rank, int world);
  ~Commons();
  Commons(const Commons&) = delete;

  static int64_t nbytes(int world);
  static int64_t board_at();

  // The calls of comm/seam.py: each throws std::runtime_error once the ranks are stopped, if the ranks do not do the
  // same, and if two threads use them.
  void add(void* y, int64_t count, Kind kind);
  struct Norm { const float* weight; float eps; };
  void add_norm(void* x, const void* y, int64_t rows, int64_t size, Kind kind, Norm norm, void* out);
  void gather(const void* part, int64_t rows, int64_t width, void* out, int64_t out_width);  // widths in bytes
  void tell(void* x, int64_t nbytes);

  void mute(int by) { muted_.fetch_add(by); }
  bool muted() const { return muted_.load() != 0; }
  void stop();
  bool stopped() const { return head_->stopped.load(std::memory_order_acquire) != 0; }

  // The ring: rank 0 writes, and each other rank reads all frames.
  bool room(int64_t nbytes) const;
  void put(const void* from, int64_t nbytes);  // there is room
  int64_t take(void* to);                      // the next frame, of kMostFrame bytes at most; -1: there is none
  bool wait(int64_t ns);                       // for a frame; ends early when stopped

  const int rank, world;

 private:
  char* part(int rank, uint32_t call) const { return parts_ + (2 * rank + (call & 1)) * kSlotBytes; }
  const Tag& tag(int rank, uint32_t call) const { return places_[rank].tags[call & 1]; }
  uint32_t begin(const Tag& tag);
  void publish(uint32_t call);
  void await(int rank, uint32_t call);
  void await_all(uint32_t call, const Tag& tag);
  void await_slowly(Place& place, uint32_t call);
  void compare(int rank, uint32_t call, const Tag& tag) const;
  void place_gathered(uint32_t call, int64_t begin, int64_t rows, char* out, int64_t out_width) const;
  uint64_t where(int64_t nbytes, uint64_t& skipped) const;
  void check() const;
  void beat();

  char* memory_ = nullptr;
  Head* head_ = nullptr;
  BoardLine* board_ = nullptr;
  Place* places_ = nullptr;
  Cursor* cursors_ = nullptr;
  Ring* ring_ = nullptr;
  char *frames_ = nullptr, *parts_ = nullptr;
  std::atomic<int> muted_{0};
  std::atomic<int64_t> thread_{0};
  uint32_t call_ = 0;
  std::mutex mutex_;
  std::condition_variable closing_;
  bool closes_ = false;
  std::thread pulse_;
};

// The commons of this number. Throws std::runtime_error once it is closed.
std::shared_ptr<Commons> commons(int64_t number);

}  // namespace gapless
