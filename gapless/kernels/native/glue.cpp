#include "glue.h"

#include <algorithm>

namespace gapless {

void begin_decode(
    const int32_t* words, int64_t count, int64_t writes, Table state, Table history, Table pages, int64_t page_size,
    const DecodeOut& out) {
  const int32_t *rows = words + HEADER_WORDS, *pairs = rows + count;
  for (int64_t i = 0; i < writes; i++) pages.data[pairs[PAGE_WORDS * i]] = pairs[PAGE_WORDS * i + 1];
  for (int64_t i = 0; i < count; i++) {
    int64_t row = rows[i], position = state.row(row)[COMPUTED];
    bool active = state.row(row)[ACTIVE];
    out.rows[i] = row;
    out.ids[i] = history.row(row)[position];
    out.positions[i] = position;
    out.slots[i] = active ? pages.row(row)[position / page_size] * page_size + position % page_size : 0;
    out.kv_lens[i] = active ? position + 1 : 1;
  }
}

namespace {

int32_t flag_of(int32_t token, bool finite, int64_t length, const int32_t* params, int64_t columns) {
  if (!finite) return ERROR;
  if (std::find(params + STOP_IDS, params + columns, token) != params + columns) return STOP;
  return length + 1 >= params[MAX_LEN] ? LENGTH_REACHED : LIVE;
}

}  // namespace

void finish(
    const Finished& step, Table state, Table params, Table history, int32_t* lines, int64_t line_words, int32_t* out) {
  int32_t* line = lines + step.words[PACKET_SLOT] * line_words;
  line[0] = step.words[PACKET_STEP], line[1] = int32_t(step.sampled), line[2] = line[3] = 0;
  for (int64_t i = 0; i < step.batch; i++) {
    int64_t row = step.rows[i];
    int32_t* own = state.row(row);
    bool active = own[ACTIVE];
    if (active) own[COMPUTED] += step.sizes ? int32_t(step.sizes[i]) : 1;
    if (i >= step.sampled) continue;
    int32_t flag = INERT, token = NO_TOKEN;
    if (active) flag = flag_of(int32_t(step.tokens[i]), step.finite[i], own[LENGTH], params.row(row), params.columns);
    if (active && flag != ERROR) {
      token = int32_t(step.tokens[i]);
      history.row(row)[own[LENGTH]++] = token;
    }
    own[ACTIVE] = flag == LIVE ? own[ACTIVE] : 0;
    out[i] = token;
    line += OUTBOX_COLUMNS;
    line[0] = int32_t(row), line[1] = own[GENERATION], line[2] = token, line[3] = flag;
  }
}

}  // namespace gapless
