// The operators of a step's own bookkeeping: its beginning and end, drafts, masks, scores, pages.
#include <algorithm>
#include <cstring>

#include "masks.h"
#include "ops.h"
#include "pages.h"
#include "scores.h"
#include "suffixes.h"

namespace gapless {
namespace {

// Copies rows, and adds the checksums of the copies (see gapless/kernels/pages.py). On the calling thread, beside the
// steps.
void copy_pages(const Tensor& src, const Tensor& dst, const Tensor& places, const Tensor& sums) {
  whole(places), whole(sums);
  const int64_t count = sums.numel(), words = src.size(1);
  fits(
      src.dim() == 2 && dst.dim() == 2 && dst.size(1) == words && src.stride(1) == 1 && dst.stride(1) == 1 &&
          places.numel() == 2 * count,
      "copy_pages");
  const int32_t *from = places.const_data_ptr<int32_t>(), *to = from + count;
  int64_t* totals = sums.mutable_data_ptr<int64_t>();
  for (int64_t page = 0; page < count; page++) {
    TORCH_CHECK(
        from[page] >= 0 && from[page] < src.size(0) && to[page] >= 0 && to[page] < dst.size(0),
        "gapless: copy_pages of a page that is not there");
    const int32_t* one = src.const_data_ptr<int32_t>() + from[page] * src.stride(0);
    int32_t* arrived = dst.mutable_data_ptr<int32_t>() + to[page] * dst.stride(0);
    totals[page] = int64_t(uint64_t(totals[page]) + copy_page(one, words, arrived));
  }
}

void ask_op(const Tensor& rows, const Tensor& state, const Tensor& params, int64_t drafts) {
  fit_tables("ask", state, params), fit_params("ask", params);
  for (int64_t i = 0; i < rows.size(0); i++) {
    int32_t *line = table(state).row(ints(rows)[i]), *own = table(params).row(ints(rows)[i]);
    int32_t room = std::min(own[DRAFTS], own[MAX_LEN] - 1 - line[LENGTH]);
    line[DRAFTED] = line[LENGTH] + std::clamp(room, 0, int32_t(drafts));
  }
}

void keep_drafts_op(
    const Tensor& ids, const Tensor& positions, const Tensor& rows, const Tensor& slots, const Tensor& history) {
  const int64_t count = ids.size(0);
  fits(positions.numel() == count && rows.numel() == count && slots.numel() == count, "keep_drafts");
  for (int64_t i = 0; i < ids.size(0); i++) {
    bool real = longs(slots)[i] > 0;
    table(history).row(real ? longs(rows)[i] : 0)[real ? longs(positions)[i] : 0] = int32_t(longs(ids)[i]);
  }
}

// The listed rows that get masks, each with its sample, once.
std::vector<std::pair<int64_t, Masked>> masked_rows(
    const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& mail) {
  whole(index), whole(rows);
  fit_tables("mask", state, params, history, mail), fit_params("mask", params);
  TORCH_CHECK(row_stride(mail) % 2 == 0, "gapless: a tag is one int64");
  std::vector<std::pair<int64_t, Masked>> found;
  for (int64_t i = 0; i < index.size(0); i++) {
    int64_t sample = index.const_data_ptr<int32_t>()[i], row = rows.const_data_ptr<int32_t>()[sample];
    if (!table(params).row(row)[MASKED] || (!found.empty() && found.back().first == sample)) continue;  // padding
    int32_t* own = table(state).row(row);
    int32_t* drafts = table(history).row(row) + own[LENGTH];
    found.push_back({sample, {own, drafts, data<int32_t>(mail) + row * mail.stride(0)}});
  }
  return found;
}

void mask_op(
    const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& masks, const Tensor& mail, int64_t places) {
  whole(masks);
  fits(masks.dim() == 3 && masks.size(0) == state.size(0) && masks.size(1) >= places, "mask");
  int64_t words = masks.size(2);
  TORCH_CHECK(mail.size(1) >= MAIL_MASK + places * words, "gapless: a mask does not fit into the mail");
  for (const auto& [sample, row] : masked_rows(index, rows, state, params, history, mail)) {
    int64_t line = rows.const_data_ptr<int32_t>()[sample];
    mask(row, {data<int32_t>(masks) + line * masks.stride(0), words, places});
  }
}

void reply_op(
    const Tensor& index, const Tensor& rows, const Tensor& tokens, const Tensor& state, const Tensor& params,
    const Tensor& history, const Tensor& mail, int64_t drafts, int64_t most) {
  whole(tokens);
  fits(tokens.dim() == 2 && tokens.size(0) <= rows.size(0), "reply");
  int64_t width = tokens.size(1);
  for (const auto& [sample, row] : masked_rows(index, rows, state, params, history, mail)) {
    const int32_t* given = tokens.const_data_ptr<int32_t>() + sample * width;
    if (most) expect(row, table(params).row(rows.const_data_ptr<int32_t>()[sample]), given, width, most);
    reply(row, given, width, drafts);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> begin_decode_op(
    const Tensor& words, int64_t count, int64_t places, int64_t writes, const Tensor& state, const Tensor& history,
    const Tensor& pages, int64_t page_size) {
  whole(words);
  fit_tables("begin_decode", state, history, pages);
  fits(words.numel() >= HEADER_WORDS + count + PAGE_WORDS * writes && places > 0, "begin_decode");
  auto fresh = [&] { return at::empty({count * places}, words.options().dtype(at::kLong)); };
  Tensor rows = fresh(), ids = fresh(), positions = fresh(), slots = fresh(), kv_lens = fresh();
  auto to = [](const Tensor& x) { return data<int64_t>(x); };
  begin_decode(
      words.const_data_ptr<int32_t>(), count, places, writes, table(state), table(history), table(pages), page_size,
      {to(rows), to(ids), to(positions), to(slots), to(kv_lens)});
  return {rows, ids, positions, slots, kv_lens};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> begin_mixed_op(
    const Tensor& words, int64_t count, int64_t decode, int64_t writes, int64_t admissions, int64_t tokens,
    int64_t places, const Tensor& state, const Tensor& params, const Tensor& history, const Tensor& pages,
    int64_t page_size) {
  whole(words);
  fit_tables("begin_mixed", state, params, history, pages), fit_params("begin_mixed", params);
  const int64_t line = 1 + state.size(1) + params.size(1);
  fits(
      words.numel() >= HEADER_WORDS + 2 * count + PAGE_WORDS * writes + line * admissions && decode <= count &&
          places > 0,
      "begin_mixed");
  auto fresh = [&](int64_t size) { return at::empty({size}, words.options().dtype(at::kLong)); };
  int64_t batch = count + decode * (places - 1);
  Tensor rows = fresh(batch), last = fresh(batch), kv_lens = fresh(batch);
  Tensor starts = fresh(batch + 1), ids = fresh(tokens), positions = fresh(tokens), slots = fresh(tokens);
  auto to = [](const Tensor& x) { return data<int64_t>(x); };
  begin_mixed(
      words.const_data_ptr<int32_t>(), {count, decode, writes, admissions, tokens, places}, table(state),
      table(params),
      table(history), table(pages), page_size,
      {to(rows), to(last), to(kv_lens), to(starts), to(ids), to(positions), to(slots)});
  return {rows, last, kv_lens, starts, ids, positions, slots};
}

void finish_op(
    const Tensor& words, const Tensor& rows, const Maybe& sizes, const Tensor& tokens, const Tensor& finite,
    const Tensor& state, const Tensor& params, const Tensor& history, const Tensor& lines, const Tensor& out) {
  whole(words), whole(finite), whole(out);
  fit_tables("finish", state, params, history), fit_params("finish", params);
  fits(
      words.numel() >= HEADER_WORDS && tokens.dim() == 2 && tokens.size(0) <= rows.size(0) &&
          finite.numel() == tokens.size(0) && (!sizes || sizes->numel() == rows.size(0)) &&
          out.numel() == tokens.numel() && lines.dim() == 2 &&
          lines.size(1) >= (1 + tokens.size(0)) * ((LINE_TOKENS + tokens.size(1) + 3) / 4 * 4),
      "finish");
  Finished step{data<int32_t>(words), ints(rows), sizes ? ints(*sizes) : nullptr, rows.size(0), tokens.size(0),
                tokens.size(1), longs(tokens), finite.const_data_ptr<bool>()};
  finish(
      step, table(state), table(params), table(history), table(lines).data, lines.size(0), lines.size(1),
      data<int32_t>(out));
}

Tensor accept_op(
    const Tensor& tokens, const Tensor& finite, const Tensor& rows, const Tensor& state, const Tensor& history,
    int64_t width) {
  whole(tokens), whole(finite);
  int64_t count = rows.size(0);
  fit_tables("accept", state, history);
  fits(
      finite.numel() == tokens.size(0) && (!count || (tokens.size(0) % count == 0 && tokens.size(0) <= count * width)),
      "accept");
  Tensor out = at::empty({count, width}, tokens.options());
  accept(
      longs(tokens), finite.const_data_ptr<bool>(), ints(rows), count, count ? tokens.size(0) / count : 1, table(state),
      table(history), data<int64_t>(out), width);
  return out;
}

Tensor look_up_op(
    const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& history, int64_t most,
    int64_t shortest, int64_t longest) {
  fit_tables("look_up", state, params, history), fit_params("look_up", params);
  Tensor same = at::empty({rows.size(0)}, rows.options());
  look_up(
      ints(rows), rows.size(0), table(state), table(params), table(history), {most, shortest, longest},
      data<int32_t>(same));
  return same;
}

Suffixes suffixes(const Tensor& table) {
  whole(table);
  fits(table.dim() == 3 && table.size(1) > 1 && table.size(2) == SUFFIX_WORDS, "suffixes");
  return {data<int32_t>(table), table.size(0), table.size(1)};
}

void remember_op(
    const Tensor& rows, const Tensor& tokens, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& noted) {
  whole(tokens);
  fit_tables("remember", state, params, history), fit_params("remember", params);
  fits(tokens.dim() == 2 && tokens.size(0) == rows.size(0), "remember");
  remember(
      ints(rows), rows.size(0), ints(tokens), tokens.size(1), {table(state), table(params), table(history)},
      suffixes(noted));
}

void recall_op(
    const Tensor& rows, const Tensor& same, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& noted, int64_t most, int64_t factor, int64_t least) {
  fit_tables("recall", state, params, history), fit_params("recall", params);
  fits(same.numel() == rows.size(0), "recall");
  recall(
      ints(rows), rows.size(0), ints(same), {table(state), table(params), table(history)}, suffixes(noted),
      {most, factor, least});
}

void score_op(
    const Tensor& logits, const Tensor& index, const Tensor& words, const Tensor& tokens, const Tensor& state,
    const Tensor& outboxes, int64_t start, int64_t width) {
  whole(logits), whole(words), whole(tokens);
  fits(
      logits.dim() == 2 && tokens.dim() == 2 && tokens.size(0) > 0 && words.numel() >= HEADER_WORDS + tokens.size(0),
      "score");
  Table boxes = table(outboxes);
  int64_t slot = (words.const_data_ptr<int32_t>()[PACKET_SLOT] - 1 + outboxes.size(0)) % outboxes.size(0);
  TORCH_CHECK(
      start + index.size(0) * (SCORE_TOP + 2 * width) <= boxes.columns, "gapless: scores do not fit into an outbox");
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    Scored<T> step{data<T>(logits), logits.size(1), ints(index), index.size(0), ints(words) + HEADER_WORDS,
                   ints(tokens), tokens.size(0), tokens.size(1)};
    score(step, table(state), width, boxes.row(slot) + start);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def("copy_pages(Tensor src, Tensor(a!) dst, Tensor places, Tensor(b!) sums) -> ()");
  m.def(
      "mask(Tensor index, Tensor rows, Tensor(a!) state, Tensor params, Tensor history, Tensor(b!) masks, "
      "Tensor mail, int places) -> ()");
  m.def(
      "reply(Tensor index, Tensor rows, Tensor tokens, Tensor(a!) state, Tensor params, Tensor(b!) history, "
      "Tensor(c!) mail, int drafts, int most) -> ()");
  m.def("ask(Tensor rows, Tensor(a!) state, Tensor params, int drafts) -> ()");
  m.def("keep_drafts(Tensor ids, Tensor positions, Tensor rows, Tensor slots, Tensor(a!) history) -> ()");
  m.def(
      "begin_decode(Tensor words, int count, int places, int writes, Tensor state, Tensor history, Tensor(a!) pages, "
      "int page_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "begin_mixed(Tensor words, int count, int decode, int writes, int admissions, int tokens, int places, "
      "Tensor(a!) state, "
      "Tensor(b!) params, Tensor(c!) history, Tensor(d!) pages, int page_size) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "finish(Tensor(a!) words, Tensor rows, Tensor? sizes, Tensor tokens, Tensor finite, Tensor(b!) state, "
      "Tensor params, Tensor(c!) history, Tensor(d!) lines, Tensor(e!) out) -> ()");
  m.def("accept(Tensor tokens, Tensor finite, Tensor rows, Tensor state, Tensor history, int width) -> Tensor");
  m.def(
      "look_up(Tensor rows, Tensor(a!) state, Tensor params, Tensor(b!) history, int most, int shortest, int longest) "
      "-> Tensor");
  m.def(
      "remember(Tensor rows, Tensor tokens, Tensor state, Tensor params, Tensor history, Tensor(a!) suffixes) -> ()");
  m.def(
      "recall(Tensor rows, Tensor same, Tensor(a!) state, Tensor params, Tensor(b!) history, Tensor suffixes, "
      "int most, int factor, int least) -> ()");
  m.def(
      "score(Tensor logits, Tensor index, Tensor words, Tensor tokens, Tensor state, Tensor(a!) outboxes, int start, "
      "int width) -> ()");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("copy_pages", copy_pages);
  m.impl("mask", mask_op);
  m.impl("reply", reply_op);
  m.impl("ask", ask_op);
  m.impl("keep_drafts", keep_drafts_op);
  m.impl("begin_decode", begin_decode_op);
  m.impl("begin_mixed", begin_mixed_op);
  m.impl("finish", finish_op);
  m.impl("accept", accept_op);
  m.impl("look_up", look_up_op);
  m.impl("remember", remember_op);
  m.impl("recall", recall_op);
  m.impl("score", score_op);
}

}  // namespace gapless
