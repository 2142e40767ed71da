// The device's memory, a caching allocator as CUDA's for it, and pinned memory of the host.
#include "fake.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace gapless::fake {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRound = 512, kPage = 4096, kSegment = 2 << 20;
constexpr size_t kPoisoned = 1 << 20;  // bytes of a block that are overwritten before its use
constexpr int kPoison = 0xA5;
constexpr PoolId kNoPool{0, 0};

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

const size_t total = [] {
  const char* asked = std::getenv("GAPLESS_FAKE_BYTES");
  return asked == nullptr ? size_t{4} << 30 : rounded(std::strtoull(asked, nullptr, 10), kPage);
}();

// Two addresses for each byte: tensors have those of the first half, which cannot be touched, kernels those of the second.
char* arena() {
  static char* const base = [] {
    void* found = mmap(nullptr, 2 * total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no addresses for the fake device's memory");
    TORCH_CHECK(mprotect(static_cast<char*>(found) + total, total, PROT_READ | PROT_WRITE) == 0, "no memory to map");
    return static_cast<char*>(found);
  }();
  return base;
}

struct Block {
  char* address;
  size_t size;
  Stream* stream;
  PoolId pool;
  std::vector<Stream*> used_on;  // other streams that were named by record_stream
  uint64_t freed = 0;            // the number of the last work of `stream` that may use it
};

// Free memory, and the number of the last work that may use it, of the stream that it belongs to.
struct Piece {
  size_t size;
  uint64_t number = 0;
};

using Cache = std::pair<PoolId, Stream*>;
using Pieces = std::map<char*, Piece>;
using Segments = std::map<char*, size_t>;

// Adds memory to free pieces, and joins it with its neighbours of the same segment.
void join(Pieces& pieces, char* address, Piece piece, const Segments& segments = {}) {
  auto it = pieces.emplace(address, piece).first;
  const auto meets = [&](Pieces::iterator one, Pieces::iterator next) {
    return next != pieces.end() && one->first + one->second.size == next->first && !segments.contains(next->first);
  };
  const auto take_next = [&](Pieces::iterator one, Pieces::iterator next) {
    one->second = {one->second.size + next->second.size, std::max(one->second.number, next->second.number)};
    pieces.erase(next);
  };
  if (meets(it, std::next(it))) take_next(it, std::next(it));
  if (it != pieces.begin() && meets(std::prev(it), it)) take_next(std::prev(it), it);
}

// Cuts memory off the smallest piece that has it; nullptr if none has.
char* cut(Pieces& pieces, size_t size) {
  auto best = pieces.end();
  for (auto it = pieces.begin(); it != pieces.end(); ++it)
    if (it->second.size >= size && (best == pieces.end() || it->second.size < best->second.size)) best = it;
  if (best == pieces.end()) return nullptr;
  const auto [address, piece] = *best;
  pieces.erase(best);
  if (piece.size > size) pieces.emplace(address + size, Piece{piece.size - size, piece.number});
  return address;
}

void count(c10::CachingAllocator::StatArray& stats, int64_t amount) {
  auto& stat = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  if (amount > 0) stat.increase(static_cast<size_t>(amount));
  if (amount < 0) stat.decrease(static_cast<size_t>(-amount));
}

bool all_passed(const std::vector<Point>& points) {
  for (const Point& point : points)
    if (!point.stream->quietly_passed(point.number)) return false;
  return true;
}

struct DeviceMemory final : c10::DeviceAllocator {
  std::mutex mutex;
  Pieces unused;      // of the arena
  Segments segments;  // taken from it
  std::map<Cache, Pieces> cached;
  std::vector<std::pair<Block, std::vector<Point>>> busy;  // freed, but in use on other streams
  std::map<PoolId, int> pools;                             // graphs that keep each
  DeviceStats stats;

  DeviceMemory() { unused.emplace(arena(), Piece{total}); }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device()};
    check();
    Stream& stream = current();
    const auto capture = stream.capture();
    const size_t size = rounded(bytes, kRound);
    Block* block = take(size, &stream, capture ? capture->pool : kNoPool);
    if (block == nullptr && !capture) {
      emptyCache();
      block = take(size, &stream, kNoPool);
    }
    if (block == nullptr) run_out(bytes);
    // A kernel that reads what nothing has written sees this, not what the last owner left.
    if (size <= kPoisoned) stream.submit([=, address = for_kernels(block->address)] { std::memset(address, kPoison, size); });
    return {block->address, block, &free, device()};
  }

  Block* take(size_t size, Stream* stream, PoolId pool) {
    std::lock_guard lock(mutex);
    settle();
    Pieces& cache = cached[{pool, stream}];
    char* address = cut(cache, size);
    if (address == nullptr && (grow(cache, std::max(size, kSegment)) || grow(cache, size))) address = cut(cache, size);
    if (address == nullptr) return nullptr;
    count(stats.allocation, 1);
    count(stats.allocated_bytes, static_cast<int64_t>(size));
    count_active(1, size);
    return new Block{address, size, stream, pool, {}};
  }

  void count_active(int64_t sign, size_t size) {
    count(stats.active, sign);
    count(stats.active_bytes, sign * static_cast<int64_t>(size));
  }

  // Takes a segment from the arena, as others do from their driver.
  bool grow(Pieces& cache, size_t size) {
    char* const address = cut(unused, size);
    if (address == nullptr) return false;
    segments.emplace(address, size);
    cache.emplace(address, Piece{size});
    ++stats.num_device_alloc;
    count(stats.segment, 1);
    count(stats.reserved_bytes, static_cast<int64_t>(size));
    return true;
  }

  static void free(void* raw) {
    const std::unique_ptr<Block> block(static_cast<Block*>(raw));
    static_cast<DeviceMemory*>(device_allocator())->give_back(std::move(*block));
  }

  void give_back(Block block) {
    std::lock_guard lock(mutex);
    count(stats.allocation, -1);
    count(stats.allocated_bytes, -static_cast<int64_t>(block.size));
    std::vector<Point> points;
    for (Stream* stream : std::exchange(block.used_on, {})) points.push_back({stream, stream->submitted()});
    block.freed = block.stream->submitted();
    busy.emplace_back(std::move(block), std::move(points));
    settle();
  }

  // Moves blocks that no other stream uses any more to the caches; with the lock.
  void settle() {
    std::vector<std::pair<Block, std::vector<Point>>> still;
    for (auto& [block, points] : busy) {
      if (!all_passed(points)) {
        still.emplace_back(std::move(block), std::move(points));
        continue;
      }
      count_active(-1, block.size);
      if (!pools.contains(block.pool)) block.pool = kNoPool;
      poison(block);
      join(cached[{block.pool, block.stream}], block.address, {block.size, block.freed}, segments);
    }
    busy = std::move(still);
  }

  // Overwrites a freed block after its last use, so that the next owner's reader sees it too, if it comes too early.
  // Graphs use the memory of their pools again.
  static void poison(Block& block) {
    if (block.size > kPoisoned || block.pool != kNoPool || block.stream->capture()) return;
    const auto overwrite = [address = for_kernels(block.address), size = block.size] { std::memset(address, kPoison, size); };
    if (block.stream->quietly_passed(block.freed)) return overwrite();
    try {
      block.freed = block.stream->submit(overwrite);
    } catch (const c10::Error&) {
      // The device has failed or ended: nothing reads it any more.
    }
  }

  // Segments that are free as a whole, and whose work is done, go back to the arena; not those that a graph keeps.
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    synchronize_device();
    std::lock_guard lock(mutex);
    settle();
    for (auto& [cache, pieces] : cached) {
      if (cache.first != kNoPool) continue;
      std::erase_if(pieces, [&, stream = cache.second](const auto& one) {
        const auto found = segments.find(one.first);
        const bool ends = found != segments.end() && found->second == one.second.size &&
                          stream->quietly_passed(one.second.number);
        if (ends) restore(found->first, found->second);
        return ends;
      });
    }
  }

  void restore(char* address, size_t size) {
    segments.erase(address);
    ++stats.num_device_free;
    count(stats.segment, -1);
    count(stats.reserved_bytes, -static_cast<int64_t>(size));
    auto* const first = static_cast<char*>(for_kernels(address));
    auto* const page = first + (kPage - reinterpret_cast<uintptr_t>(first) % kPage) % kPage;
    if (page < first + size) madvise(page, (first + size - page) / kPage * kPage, MADV_DONTNEED);
    join(unused, address, {size});
  }

  [[noreturn]] void run_out(size_t bytes) {
    ++stats.num_ooms;
    const auto [left, all] = getMemoryInfo(0);
    const auto said = std::to_string(bytes) + " bytes wanted, " + std::to_string(left) + " of " + std::to_string(all) + " free";
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the fake device is out of memory: " + said);
    std::abort();  // never reached
  }

  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_on_stream(data, stream_of(stream)); }
  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex);
    for (auto* each : counted()) (*each)[0].reset_accumulated();
    stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex);
    for (auto* each : counted()) (*each)[0].reset_peak();
  }
  std::vector<c10::CachingAllocator::StatArray*> counted() {
    return {&stats.allocation, &stats.segment,        &stats.active,
            &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes};
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard lock(mutex);
    size_t left = 0;
    for (const auto& [address, piece] : unused) left += piece.size;
    return {left, total};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    void *const target = for_kernels(to), *const source = for_kernels(from);
    current().submit([=] { std::memcpy(target, source, bytes); });
  }
};

DeviceMemory& memory() {
  static auto* one = new DeviceMemory;
  return *one;
}

// Pinned memory of the host, whole pages. As in CUDA's allocator, freed memory is kept, and reused once the copies are
// done that were enqueued with it.
struct PinnedMemory final : at::HostAllocator {
  struct Pinned {
    size_t size;
    bool freed = false;
    std::vector<Point> points;
  };
  std::mutex mutex;
  std::map<char*, Pinned> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = rounded(std::max<size_t>(bytes, 1), kPage);
    std::lock_guard lock(mutex);
    for (auto& [address, block] : blocks) {
      if (!block.freed || block.size < size || block.size > 2 * size || !all_passed(block.points)) continue;
      block.freed = false;
      block.points.clear();
      return {address, address, &free, c10::DeviceType::CPU};
    }
    void* const fresh = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, fresh != MAP_FAILED, "no ", bytes, " bytes of pinned memory");
    blocks.emplace(static_cast<char*>(fresh), Pinned{size, false, {}});
    return {fresh, fresh, &free, c10::DeviceType::CPU};
  }

  static void free(void* address) {
    auto* const self = static_cast<PinnedMemory*>(pinned_allocator());
    std::lock_guard lock(self->mutex);
    self->blocks.at(static_cast<char*>(address)).freed = true;
  }

  Pinned* find(const void* address) {  // with the lock
    auto it = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (it == blocks.begin()) return nullptr;
    --it;
    return static_cast<const char*>(address) < it->first + it->second.size ? &it->second : nullptr;
  }

  bool record_event(void* address, void*, c10::Stream stream) override {
    Stream& on = stream_of(stream);
    use_pinned(address, {&on, on.submitted()});
    return true;
  }
  void empty_cache() override {
    std::lock_guard lock(mutex);
    for (auto it = blocks.begin(); it != blocks.end();) {
      const bool ends = it->second.freed && all_passed(it->second.points);
      if (ends) munmap(it->first, it->second.size);
      it = ends ? blocks.erase(it) : std::next(it);
    }
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

PinnedMemory& pinned() {
  static auto* one = new PinnedMemory;
  return *one;
}

}  // namespace

void* for_kernels(const void* address) {
  return address == nullptr ? nullptr : static_cast<char*>(const_cast<void*>(address)) + total;
}

c10::Allocator* device_allocator() { return &memory(); }

c10::Allocator* pinned_allocator() { return &pinned(); }

void register_allocators() {
  c10::SetAllocator(kFake, &memory());
  at::setHostAllocator(kFake, &pinned());
}

bool is_pinned(const void* address) {
  std::lock_guard lock(pinned().mutex);
  return pinned().find(address) != nullptr;
}

void use_pinned(const void* address, Point point) {
  std::lock_guard lock(pinned().mutex);
  if (auto* block = pinned().find(address)) block->points.push_back(point);
}

void record_on_stream(const c10::DataPtr& data, Stream& stream) {
  if (data.get_deleter() != &DeviceMemory::free) return;
  auto* const block = static_cast<Block*>(data.get_context());
  std::lock_guard lock(memory().mutex);
  if (block->stream != &stream) block->used_on.push_back(&stream);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const void* const old = for_kernels(storage.data());
  const size_t kept = std::min(storage.nbytes(), bytes);
  c10::DataPtr fresh = memory().allocate(bytes);
  if (kept > 0) current().submit([old, to = for_kernels(fresh.get()), kept] { std::memcpy(to, old, kept); });
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void retain_pool(PoolId pool) {
  std::lock_guard lock(memory().mutex);
  ++memory().pools[pool];
}

void release_pool(PoolId pool) {
  std::vector<Point> points;
  for (Stream* stream : all_streams()) points.push_back({stream, stream->submitted()});
  std::lock_guard lock(memory().mutex);
  if (--memory().pools[pool] > 0) return;
  memory().pools.erase(pool);
  for (auto& [cache, pieces] : memory().cached) {
    if (cache.first != pool) continue;
    for (const auto& [address, piece] : pieces) {  // a replay may still be under way, on any stream
      memory().count_active(1, piece.size);
      memory().busy.emplace_back(Block{address, piece.size, cache.second, pool, {}, piece.number}, points);
    }
    pieces.clear();
  }
}

}  // namespace gapless::fake
