// Ranks without Python and torch: three processes send orders and add, and check each. Runs on processors that qemu
// plays too. A failed check ends with a line about it.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "commons.h"
#include "vec.h"

using namespace gapless;

constexpr int kWorld = 3, kOrders = 100'000, kSums = 3'000;

void check(bool good, const char* what, long at) {
  if (good) return;
  std::fprintf(stderr, "%s: %ld is wrong\n", what, at);
  std::exit(1);
}

std::vector<uint32_t> order(uint32_t number) {
  std::vector<uint32_t> words(1 + number * 2654435761u % (number % 100 ? 40 : 4000));
  for (uint32_t i = 0; i < words.size(); ++i) words[i] = number * 31 + i;
  return words;
}

void write_orders(Commons& ranks) {
  for (uint32_t number = 0; number < kOrders; ++number) {
    const auto words = order(number);
    while (!ranks.room(words.size() * 4)) usleep(50);
    ranks.put(words.data(), words.size() * 4);
  }
}

void read_orders(Commons& ranks) {
  std::vector<char> frame(kMostFrame);
  for (uint32_t number = 0; number < kOrders; ++number) {
    const auto words = order(number);
    int64_t length;
    while ((length = ranks.take(frame.data())) < 0) ranks.wait(1'000'000'000);
    check(length == int64_t(words.size() * 4) && !std::memcmp(frame.data(), words.data(), length), "order", number);
  }
}

// Whole numbers, so that every sum is exact in every type.
template <typename T>
void add(Commons& ranks, Kind kind, int call) {
  std::vector<T> part(1 + call % 97 + (call % 500 ? 0 : 600'000));
  const auto value = [&](int rank, size_t i) { return float(int((i + call) % 13) * (rank + 1) - 20); };
  for (size_t i = 0; i < part.size(); ++i) assign(part[i], value(ranks.rank, i));
  ranks.add(part.data(), part.size(), kind);
  for (size_t i = 0; i < part.size(); ++i)
    check(to_float(part[i]) == value(0, i) + value(1, i) + value(2, i), "sum", call);
}

void tell(Commons& ranks, int call) {
  std::vector<int32_t> words(1 + call % 7, ranks.rank ? -1 : call);
  ranks.tell(words.data(), words.size() * 4);
  for (int32_t word : words) check(word == call, "word", call);
}

void gather(Commons& ranks, int call) {
  const int64_t rows = 1 + call % 3, width = 4 * (ranks.rank + 1);
  std::vector<int32_t> part(rows * (ranks.rank + 1), ranks.rank + call), out(ranks.rank ? 0 : rows * 6);
  ranks.gather(part.data(), rows, width, out.data(), ranks.rank ? 0 : 24);
  for (size_t i = 0; i < out.size(); ++i) check(out[i] == call + (i % 6 > 2 ? 2 : i % 6 > 0), "column", call);
}

int main() {
  const int fd = memfd_create("ranks", 0);
  check(ftruncate(fd, Commons::nbytes(kWorld)) == 0, "size", 0);
  int rank = 0;
  for (int other = 1; other < kWorld && !rank; ++other)
    if (fork() == 0) rank = other;  // before any thread: qemu does not fork those
  auto& ranks = *new Commons(fd, rank, kWorld);
  rank ? read_orders(ranks) : write_orders(ranks);
  for (int call = 0; call < kSums; ++call) {
    if (call % 3 == 0) add<float>(ranks, FLOAT, call);
    if (call % 3 == 1) add<bf16>(ranks, BFLOAT16, call);
    if (call % 3 == 2) add<f16>(ranks, HALF, call);
    if (call % 5 == 0) tell(ranks, call);
    if (call % 7 == 0) gather(ranks, call);
  }
  if (rank) std::_Exit(0);
  for (int other = 1, status; other < kWorld; ++other) check(wait(&status) > 0 && status == 0, "rank", other);
  std::puts("all right");
}
