// The step's own bookkeeping over the device tables. Columns and words as in gapless/kernels/layout.py.
#pragma once

#include <cstdint>

namespace gapless {

enum State { GENERATION, ACTIVE, LENGTH, COMPUTED, LATE, DRAFTED, CUT_VALUE, CUT_ID };
enum Param {
  MIN_LEN, MAX_LEN, ADJUST_SLOT, ADAPTER_SLOT, MASKED, DRAFTS, TENANT, STOP_IDS = 8,
  TEMPERATURE = STOP_IDS + 32, TOP_P, TOP_K, MIN_P, SEED_LOW, SEED_HIGH, FIRST_PENALTY
};
enum Wish { BIASES, ALLOWED, BAD_WORDS, OUTPUT, PROCESSORS, ARGUMENTS };
enum Flag { LIVE, STOP, LENGTH_REACHED, ERROR, INERT, HELD };  // gapless/base/records.py
enum Line { LINE_ROW, LINE_GENERATION, LINE_FLAG, LINE_TOKENS };
enum Packet { PACKET_STEP, PACKET_SLOT, HEADER_WORDS };

constexpr int64_t PAGE_WORDS = 2, WISHES = ARGUMENTS + 64;
constexpr int32_t NO_TOKEN = -1, REJECTED = -2, RIGHT = -3;

// A table of int32, `columns` words a row.
struct Table {
  int32_t* data;
  int64_t columns;
  int32_t* row(int64_t i) const { return data + i * columns; }
};

struct DecodeOut {
  int64_t *rows, *ids, *positions, *slots, *kv_lens;
};

void begin_decode(
    const int32_t* words, int64_t count, int64_t places, int64_t writes, Table state, Table history, Table pages,
    int64_t page_size, const DecodeOut& out);

// The drafts of a row that a step with `places` positions a row runs.
int64_t drafts_of(const int32_t* state, int64_t places);

// See gapless/kernels/drafts.py.
void accept(
    const int64_t* tokens, const bool* finite, const int32_t* rows, int64_t count, int64_t places, Table state,
    Table history, int64_t* out, int64_t width);

struct Lookup {
  int64_t most, shortest, longest;
};

// `same` gets the length of each row's match, 0 where it has no drafts.
void look_up(
    const int32_t* rows, int64_t count, Table state, Table params, Table history, const Lookup& asked, int32_t* same);

// A packet with chunks: its counts, T tokens, which may exceed the rows', and the tokens of each decode row.
struct Mixed {
  int64_t count, decode, writes, admissions, tokens, places;
};

struct MixedOut {
  int64_t *rows, *last, *kv_lens, *starts;
  int64_t *ids, *positions, *slots;
};

void begin_mixed(
    const int32_t* words, const Mixed& packet, Table state, Table params, Table history, Table pages, int64_t page_size,
    const MixedOut& out);

struct Finished {
  int32_t* words;
  const int32_t* rows;
  const int32_t* sizes;  // null: one query token a row
  int64_t batch, sampled, width;
  const int64_t* tokens;  // [sampled, width], negative where there is none
  const bool* finite;
};

// `lines` has `slots` outboxes, `out` as many tokens as the step. The packet's header is that of the next step
// afterwards.
void finish(
    const Finished& step, Table state, Table params, Table history, int32_t* lines, int64_t slots, int64_t line_words,
    int32_t* out);

}  // namespace gapless
