// The operators that choose tokens.
#include <ATen/ops/log.h>
#include <ATen/ops/log1p.h>
#include <ATen/ops/neg.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ParallelGuard.h>

#include <algorithm>
#include <array>
#include <limits>

#include "adjust.h"
#include "masks.h"
#include "ops.h"
#include "parallel.h"
#include "sampling.h"

namespace gapless {
namespace {

// The logits excluded from a draw: stop ids below a row's minimum length, and tokens outside its mask, which is null
// without one.
struct Banned {
  const int32_t *mask, *stops, *end;

  explicit operator bool() const { return mask || stops != end; }
};

Banned banned(const int32_t* mask, const int32_t* state, const int32_t* own) {
  bool masked = own[MASKED] && !state[LATE], early = state[LENGTH] + 1 <= own[MIN_LEN] && own[STOP_IDS] >= 0;
  return {masked ? mask : nullptr, own + STOP_IDS, own + (early ? TEMPERATURE : STOP_IDS)};
}

// The mask of a row after some drafts.
const int32_t* mask_of(const Tensor& masks, int64_t row, int64_t place) {
  return masks.const_data_ptr<int32_t>() + (row * masks.size(1) + place) * masks.size(2);
}

// A float32 copy of a row's logits, with banned ones at -inf.
template <typename T>
Tensor allowed(const T* logits, int64_t vocab, const Banned& banned) {
  Tensor copy = at::empty({vocab}, at::TensorOptions().dtype(at::kFloat));
  float* to = data<float>(copy);
  for (int64_t i = 0; i < vocab; i++) to[i] = to_float(logits[i]);
  if (banned.mask) leave_masked(banned.mask, to, vocab);
  for (const int32_t* stop = banned.stops; stop < banned.end; stop++)
    if (*stop >= 0 && *stop < vocab) to[*stop] = -std::numeric_limits<float>::infinity();
  return copy;
}

// A row's line of the state table, as it is when its first `place` drafts are tokens.
std::array<int32_t, CUT_ID + 1> at_place(const int32_t* state, int64_t place) {
  std::array<int32_t, CUT_ID + 1> then;
  std::copy_n(state, CUT_VALUE, then.begin());
  std::copy_n(state + CUT_VALUE + 2 * place, 2, then.begin() + CUT_VALUE);
  then[LENGTH] += int32_t(place);
  return then;
}

// A draw of one row by temperature, among what its cut keeps.
template <typename T>
int64_t drawn(const T* logits, const Best& best, int64_t vocab, const int32_t* state, const int32_t* own) {
  Cut cut{bits_of<float>(state[CUT_VALUE]), state[CUT_ID]};
  float temperature = bits_of<float>(own[TEMPERATURE]);
  Stream stream{uint32_t(state[LENGTH]), uint32_t(own[SEED_LOW]), uint32_t(own[SEED_HIGH])};
  std::vector<Contender> few = contenders(logits, vocab, best.value, temperature, cut, stream);
  if (few.size() == 1) return few[0].id;
  // torch's own logarithms: the noise is the same to the last bit wherever torch draws it.
  Tensor noise = at::empty({int64_t(few.size())}, at::TensorOptions().dtype(at::kFloat));
  float* numbers = data<float>(noise);
  for (size_t i = 0; i < few.size(); i++) numbers[i] = -few[i].uniform;
  noise.log1p_().neg_().log_();
  auto score = [&](size_t i) { return (to_float(logits[few[i].id]) - best.value) / temperature - numbers[i]; };
  size_t chosen = 0;
  for (size_t i = 1; i < few.size(); i++)
    if (score(i) > score(chosen)) chosen = i;
  return few.at(chosen).id;
}

template <typename T>
std::pair<int64_t, bool> sampled(const T* logits, int64_t vocab, const int32_t* state, const int32_t* own) {
  Best best = best_of(logits, vocab);
  bool hot = best.finite && bits_of<float>(own[TEMPERATURE]) > 0;
  return {hot ? drawn(logits, best, vocab, state, own) : best.index, best.finite};
}

std::tuple<Tensor, Tensor> sample_op(
    const Tensor& logits, const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& masks,
    const Maybe& adjusted) {
  whole(logits), whole(rows), whole(masks);
  int64_t count = logits.size(0), vocab = logits.size(1), batch = std::max<int64_t>(1, rows.size(0));
  int64_t places = count / batch;
  fit_tables("sample", state, params, masks), fit_params("sample", params);
  fits(
      state.size(1) >= CUT_VALUE + 2 * places && masks.dim() == 3 &&
          (!masks.size(2) || masks.size(2) * 32 >= vocab) &&
          (!adjusted || (adjusted->dim() == 3 && adjusted->is_contiguous() && adjusted->size(0) >= places &&
                         adjusted->size(2) == vocab)),
      "sample");
  Tensor tokens = at::empty({count}, rows.options().dtype(at::kLong));
  Tensor finite = at::empty({count}, rows.options().dtype(at::kBool));
  int64_t* token = data<int64_t>(tokens);
  bool* is_finite = data<bool>(finite);
  const int32_t* row = rows.const_data_ptr<int32_t>();
  Table lines = table(state), settings = table(params);
  auto hot = [&](int32_t r) { return bits_of<float>(settings.row(r)[TEMPERATURE]) > 0; };
  bool random = std::any_of(row, row + rows.size(0), hot);
  auto masked = [&](int32_t r) { return settings.row(r)[MASKED] != 0; };
  fits(masks.size(1) >= places || std::none_of(row, row + rows.size(0), masked), "sample");
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* all = data<T>(logits);
    share(count, count * vocab / (random ? 1 << 14 : 1 << 17), [&](int64_t i, bool) {
      // A thread of ours or the caller's: torch must not divide one thread's part again.
      c10::ParallelGuard alone(true);
      c10::InferenceMode plain;
      const int32_t *now = lines.row(row[i % batch]), *own = settings.row(row[i % batch]);
      int64_t place = i / batch;
      token[i] = 0, is_finite[i] = true;
      if (place > drafts_of(now, places)) return;
      auto then = at_place(now, place);
      const int32_t* line = then.data();
      auto draw = [&](const auto* logits) {
        Tensor copy;
        if (auto some = banned(mask_of(masks, row[i % batch], place), line, own))
          copy = allowed(logits, vocab, some);
        std::tie(token[i], is_finite[i]) = copy.defined() ? sampled(data<float>(copy), vocab, line, own)
                                                          : sampled(logits, vocab, line, own);
      };
      if (adjusted && own[ADJUST_SLOT])
        draw(adjusted->const_data_ptr<float>() + (place * adjusted->size(1) + own[ADJUST_SLOT]) * vocab);
      else
        draw(all + i * vocab);
    });
  });
  return {tokens, finite};
}

// Logits of the tokens in `ids`, or of all.
template <typename T>
Tensor spread(const T* logits, int64_t count, const int64_t* ids, int64_t vocab) {
  Tensor all = at::empty({vocab}, at::TensorOptions().dtype(at::kFloat));
  float* to = data<float>(all);
  std::fill_n(to, vocab, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i++) to[ids ? ids[i] : i] = to_float(logits[i]);
  return all;
}

Tensor draft_op(
    const Tensor& logits, const Maybe& ids, const Tensor& rows, const Tensor& state, const Tensor& params,
    int64_t place, int64_t vocab) {
  whole(logits);
  int64_t count = logits.size(0), some = logits.size(1);
  fit_tables("draft", state, params), fit_params("draft", params);
  fits(rows.size(0) == count && some > 0 && some <= vocab && (ids ? ids->size(0) : vocab) == some, "draft");
  const int64_t *named = ids ? longs(*ids) : nullptr, *row = longs(rows);
  Tensor tokens = at::empty({count}, rows.options());
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(count, count * some / (1 << 14), [&](int64_t i, bool) {
      c10::ParallelGuard alone(true);
      c10::InferenceMode plain;
      const int32_t* own = table(params).row(row[i]);
      auto line = at_place(table(state).row(row[i]), place);
      line[CUT_VALUE] = bits_of<int32_t>(-std::numeric_limits<float>::infinity());
      line[CUT_ID] = std::numeric_limits<int32_t>::max();
      const T* drafted = data<T>(logits) + i * some;
      Banned stops = banned(nullptr, line.data(), own);
      int64_t* token = data<int64_t>(tokens) + i;
      bool greedy = bits_of<float>(own[TEMPERATURE]) <= 0;
      if (!stops && (!named || greedy)) {
        *token = sampled(drafted, some, line.data(), own).first;
        if (named) *token = named[*token];
        return;
      }
      Tensor all = allowed(data<float>(spread(drafted, some, named, vocab)), vocab, stops);
      *token = sampled(data<float>(all), vocab, line.data(), own).first;
    });
  });
  return tokens;
}

void adjust_op(
    const Tensor& logits, const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params,
    const Tensor& history, const Tensor& wishes, const Tensor& counts, const Tensor& counted, const Tensor& adjusted) {
  whole(logits), whole(index), whole(rows), whole(adjusted);
  fit_tables("adjust", state, params, history), fit_params("adjust", params);
  fits(
      params.size(1) >= ADJUST_COLUMNS && rows.size(0) > 0 && wishes.dim() == 2 && wishes.size(1) >= WISHES && counts.dim() == 2 &&
          counts.size(1) == logits.size(1) && adjusted.dim() == 3 &&
          adjusted.size(0) >= logits.size(0) / rows.size(0) && adjusted.size(2) == logits.size(1) &&
          wishes.size(0) == adjusted.size(1) && counts.size(0) == adjusted.size(1) &&
          counted.size(0) == adjusted.size(1),
      "adjust");
  int64_t vocab = logits.size(1), batch = rows.size(0), places = logits.size(0) / batch, last = -1;
  std::vector<std::pair<int64_t, Asking>> asking;
  for (int64_t i = 0; i < index.size(0); i++) {
    int64_t sample = index.const_data_ptr<int32_t>()[i], row = rows.const_data_ptr<int32_t>()[sample];
    const int32_t *own = table(params).row(row), *now = table(state).row(row);
    int64_t slot = own[ADJUST_SLOT];
    if (slot == 0 || last == sample) continue;  // padding
    last = sample;
    for (int64_t place = 0; place <= drafts_of(now, places); place++)
      asking.push_back(
          {place * batch + sample,
           {now, own, table(history).row(row), table(wishes).row(slot), table(counts).row(slot),
            table(counted).row(slot), data<float>(adjusted) + (place * adjusted.size(1) + slot) * vocab, place}});
  }
  constexpr int64_t PIECE = 1 << 15;
  int64_t pieces = (vocab + PIECE - 1) / PIECE, count = int64_t(asking.size());
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* all = data<T>(logits);
    for (const auto& one : asking) count_tokens(one.second);
    share(count * pieces, count * vocab / (1 << 16), [&](int64_t i, bool) {
      const auto& [sample, row] = asking[i / pieces];
      int64_t first = i % pieces * PIECE;
      penalize(all + sample * vocab, first, std::min(PIECE, vocab - first), row);
    });
    for (const auto& [sample, row] : asking) apply_lists(all + sample * vocab, vocab, row);
  });
}

void cut_op(
    const Tensor& logits, const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params,
    const Tensor& masks) {
  whole(logits), whole(index), whole(rows), whole(masks);
  fit_tables("cut", state, params, masks), fit_params("cut", params);
  fits(masks.dim() == 3 && (!masks.size(2) || masks.size(2) * 32 >= logits.size(1)), "cut");
  int64_t count = index.size(0), vocab = logits.size(1), batch = rows.size(0);
  const int32_t *sampled = index.const_data_ptr<int32_t>(), *row = rows.const_data_ptr<int32_t>();
  Table lines = table(state), settings = table(params);
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* all = data<T>(logits);
    share(count, count * vocab / (1 << 13), [&](int64_t i, bool) {
      int32_t own = row[sampled[i] % batch];
      int64_t place = sampled[i] / batch;
      if (own == 0 || (i && sampled[i] == sampled[i - 1])) return;  // padding
      if (place > drafts_of(lines.row(own), place + 1)) return;
      c10::InferenceMode plain;
      auto then = at_place(lines.row(own), place);
      int32_t *line = then.data(), *asked = settings.row(own);
      auto real = [&](int column) { return bits_of<float>(asked[column]); };
      Filters filters{real(TEMPERATURE), asked[TOP_K], real(TOP_P), real(MIN_P)};
      const T* logits = all + sampled[i] * vocab;
      bool spread = count == 1 && vocab > 1 << 15;  // a row of its own has the threads that others would have
      Tensor copy;
      if (auto some = banned(mask_of(masks, own, place), line, asked))
        copy = allowed(logits, vocab, some);
      Cut cut = copy.defined() ? cut_of(data<float>(copy), vocab, filters, spread)
                               : cut_of(logits, vocab, filters, spread);
      int32_t* found = lines.row(own) + CUT_VALUE + 2 * place;
      found[0] = bits_of<int32_t>(cut.value), found[1] = cut.id;
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def(
      "sample(Tensor logits, Tensor rows, Tensor state, Tensor params, Tensor masks, Tensor? adjusted) -> "
      "(Tensor, Tensor)");
  m.def(
      "adjust(Tensor logits, Tensor index, Tensor rows, Tensor state, Tensor params, Tensor history, Tensor wishes, "
      "Tensor(a!) counts, Tensor(b!) counted, Tensor(c!) adjusted) -> ()");
  m.def(
      "draft(Tensor logits, Tensor? ids, Tensor rows, Tensor state, Tensor params, int place, int vocab) -> Tensor");
  m.def("cut(Tensor logits, Tensor index, Tensor rows, Tensor(a!) state, Tensor params, Tensor masks) -> ()");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("sample", sample_op);
  m.impl("adjust", adjust_op);
  m.impl("draft", draft_op);
  m.impl("cut", cut_op);
}

}  // namespace gapless
