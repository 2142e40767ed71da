#include "glue.h"

#include <algorithm>

namespace gapless {
namespace {

void write_pages(const int32_t* pairs, int64_t writes, Table pages) {
  for (int64_t i = 0; i < writes; i++) pages.data[pairs[PAGE_WORDS * i]] = pairs[PAGE_WORDS * i + 1];
}

// The KV slot of a token.
int64_t slot(Table pages, int64_t row, int64_t position, int64_t page_size) {
  return pages.row(row)[position / page_size] * page_size + position % page_size;
}

}  // namespace

int64_t drafts_of(const int32_t* state, int64_t places) {
  return std::clamp<int64_t>(state[DRAFTED] - state[LENGTH], 0, places - 1);
}

void begin_decode(
    const int32_t* words, int64_t count, int64_t places, int64_t writes, Table state, Table history, Table pages,
    int64_t page_size, const DecodeOut& out) {
  const int32_t *rows = words + HEADER_WORDS, *pairs = rows + count;
  write_pages(pairs, writes, pages);
  for (int64_t i = 0; i < count * places; i++) {
    int64_t row = rows[i % count], place = i / count, position = state.row(row)[COMPUTED] + place;
    bool active = state.row(row)[ACTIVE] && place <= drafts_of(state.row(row), places);
    out.rows[i] = row;
    out.ids[i] = active ? history.row(row)[position] : 0;
    out.positions[i] = position;
    out.slots[i] = active ? slot(pages, row, position, page_size) : 0;
    out.kv_lens[i] = active ? position + 1 : 1;
  }
}

void begin_mixed(
    const int32_t* words, const Mixed& packet, Table state, Table params, Table history, Table pages, int64_t page_size,
    const MixedOut& out) {
  const int32_t *rows = words + HEADER_WORDS, *sizes = rows + packet.count, *pairs = sizes + packet.count;
  const int32_t *lines = pairs + PAGE_WORDS * packet.writes;
  int64_t line_words = 1 + state.columns + params.columns;
  const int32_t* prompt = lines + line_words * packet.admissions;
  write_pages(pairs, packet.writes, pages);
  for (int64_t i = 0; i < packet.admissions; i++, lines += line_words) {
    std::copy_n(lines + 1, state.columns, state.row(lines[0]));
    std::copy_n(lines + 1 + state.columns, params.columns, params.row(lines[0]));
  }
  int64_t at = 0, decode = packet.decode * packet.places, batch = decode + packet.count - packet.decode;
  for (int64_t i = 0; i < batch; i++) {
    bool chunk = i >= decode;
    int64_t from = chunk ? i - decode + packet.decode : i % packet.decode, place = chunk ? 0 : i / packet.decode;
    int64_t row = rows[from], size = sizes[from], start = state.row(row)[COMPUTED] + place;
    bool active = state.row(row)[ACTIVE] && place <= drafts_of(state.row(row), packet.places);
    if (chunk) {
      std::copy_n(prompt, size, history.row(row) + start);
      prompt += size;
    }
    out.rows[i] = row, out.last[i] = std::max<int64_t>(at + size - 1, 0), out.starts[i] = at;
    out.kv_lens[i] = active ? start + size : 1;
    for (int64_t position = start; position < start + size; position++, at++) {
      out.ids[at] = active ? history.row(row)[position] : 0;
      out.positions[at] = position;
      out.slots[at] = active ? slot(pages, row, position, page_size) : 0;
    }
  }
  out.starts[batch] = at;
  for (; at < packet.tokens; at++) out.ids[at] = out.positions[at] = out.slots[at] = 0;
}

namespace {

// Takes a continuing row's tokens, into its history and `out`, which is filled with NO_TOKEN.
int32_t take(
    const int64_t* tokens, int64_t width, int32_t* own, const int32_t* params, int32_t* history, int32_t* out) {
  for (int64_t i = 0; i < width && tokens[i] >= 0; i++) {
    int32_t token = int32_t(tokens[i]);
    history[own[LENGTH]++] = out[i] = token;
    if (std::find(params + STOP_IDS, params + TEMPERATURE, token) != params + TEMPERATURE) return STOP;
    if (own[LENGTH] >= params[MAX_LEN]) return LENGTH_REACHED;
  }
  return out[0] < 0 ? HELD : LIVE;
}

}  // namespace

void accept(
    const int64_t* tokens, const bool* finite, const int32_t* rows, int64_t count, int64_t places, Table state,
    Table history, int64_t* out, int64_t width) {
  for (int64_t i = 0; i < count; i++, out += width) {
    const int32_t *own = state.row(rows[i]), *drafts = history.row(rows[i]) + own[LENGTH];
    int64_t drafted = drafts_of(own, places), place = 0;
    std::fill_n(out, width, NO_TOKEN);
    std::fill_n(out + 1, drafted, REJECTED);
    do out[place] = tokens[place * count + i];
    while (place < drafted && drafts[place] == out[place] && finite[++place * count + i]);
    if (places == 1 && width > 1 && drafts_of(own, 2)) out[1] = drafts[0] == out[0] ? RIGHT : REJECTED;
  }
}

void look_up(
    const int32_t* rows, int64_t count, Table state, Table params, Table history, const Lookup& asked, int32_t* same) {
  for (int64_t i = 0; i < count; i++) {
    int32_t *own = state.row(rows[i]), *tokens = history.row(rows[i]);
    const int32_t* settings = params.row(rows[i]);
    int64_t length = own[LENGTH], most = std::min<int64_t>(asked.most, settings[DRAFTS]);
    same[i] = 0;
    if (!own[ACTIVE] || most == 0) continue;
    int64_t best = asked.shortest - 1, from = 0;
    for (int64_t end = length - 1; end > 0 && best < asked.longest; end--) {
      int64_t match = 0, limit = std::min(asked.longest, end);
      while (match < limit && tokens[end - 1 - match] == tokens[length - 1 - match]) match++;
      if (match > best) best = match, from = end;
    }
    int64_t drafted = from ? std::clamp<int64_t>(settings[MAX_LEN] - 1 - length, 0, most) : 0;
    for (int64_t j = 0; j < drafted; j++) tokens[length + j] = tokens[from + j];
    own[DRAFTED] = int32_t(length + drafted);
    same[i] = drafted ? int32_t(best) : 0;
  }
}

void finish(
    const Finished& step, Table state, Table params, Table history, int32_t* lines, int64_t slots, int64_t line_words,
    int32_t* out) {
  int64_t words = (LINE_TOKENS + step.width + 3) / 4 * 4;
  int32_t* line = lines + step.words[PACKET_SLOT] * line_words;
  std::fill_n(line, words, 0);
  line[0] = step.words[PACKET_STEP], line[1] = int32_t(step.sampled);
  for (int64_t i = 0; i < step.batch; i++) {
    int64_t row = step.rows[i];
    int32_t* own = state.row(row);
    bool active = own[ACTIVE];
    if (i >= step.sampled) {
      if (active) own[COMPUTED] += step.sizes ? step.sizes[i] : 1;
      continue;
    }
    int32_t flag = active ? ERROR : INERT, *given = out + i * step.width;
    for (int64_t j = 0; j < step.width; j++)
      given[j] = int32_t(std::min<int64_t>(step.tokens[i * step.width + j], NO_TOKEN));
    if (active && step.finite[i])
      flag = take(
          step.tokens + i * step.width, own[LATE] ? 0 : step.width, own, params.row(row), history.row(row), given);
    if (active) own[COMPUTED] = own[LENGTH] - 1;
    if (flag != LIVE && flag != HELD) own[ACTIVE] = 0;
    line += words;
    std::fill_n(line, words, NO_TOKEN);
    line[LINE_ROW] = int32_t(row), line[LINE_GENERATION] = own[GENERATION], line[LINE_FLAG] = flag;
    std::copy_n(given, step.width, line + LINE_TOKENS);
  }
  step.words[PACKET_STEP] = (uint32_t(step.words[PACKET_STEP]) + 1) & 0x7FFFFFFF;
  step.words[PACKET_SLOT] = (step.words[PACKET_SLOT] + 1) % int32_t(slots);
}

}  // namespace gapless
