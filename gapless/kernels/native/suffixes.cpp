#include "suffixes.h"

#include <algorithm>
#include <iterator>

namespace gapless {

namespace {

constexpr int64_t LENGTHS[] = {2, 4, 8};
constexpr int32_t SEEN_MOST = 64;

// The digests of the last tokens before `end`, one for each length; returns how many lengths there are.
int64_t digests(uint32_t tenant, const int32_t* end, int64_t known, int64_t parts, uint32_t* out) {
  uint32_t digest = tenant * 0x85EBCA6Bu;
  int64_t part = 0;
  for (int64_t back = 1; part < parts && back <= known; back++) {
    digest = (digest ^ uint32_t(end[-back])) * 0x9E3779B1u;
    digest ^= digest >> 15;
    if (back == LENGTHS[part]) out[part++] = digest;
  }
  return part;
}

bool is_of(const int32_t* entry, int32_t tenant, uint32_t digest) {
  return entry[OWN_TENANT] == tenant && entry[DIGEST] == int32_t(digest);
}

void note(int32_t* entry, int32_t tenant, uint32_t digest, int32_t token) {
  bool known = is_of(entry, tenant, digest), agrees = known && entry[NEXT] == token;
  int32_t seen = entry[SEEN] + 1, same = entry[SAME] + agrees;
  if (!known || (!agrees && 2 * same < seen)) {
    entry[OWN_TENANT] = tenant, entry[DIGEST] = int32_t(digest), entry[NEXT] = token;
    seen = same = 1;
  }
  bool halved = seen >= SEEN_MOST;
  entry[SEEN] = seen >> halved, entry[SAME] = same >> halved;
}

}  // namespace

void remember(
    const int32_t* rows, int64_t count, const int32_t* tokens, int64_t width, const Rows& tables,
    const Suffixes& suffixes) {
  for (int64_t place = 0; place < width; place++) {
    // Calls visit(number of the row among these, entry, tenant, digest, token) for all that the place writes.
    auto each = [&](auto visit) {
      for (int64_t i = 0; i < count; i++) {
        const int32_t* given = tokens + i * width;
        const int32_t* last = std::find_if(given, given + width, [](int32_t token) { return token < 0; });
        int32_t tenant = tables.params.row(rows[i])[TENANT];
        if (tenant <= 0 || place >= last - given) continue;
        int64_t known = tables.state.row(rows[i])[LENGTH] - (last - given) + place;
        uint32_t found[std::size(LENGTHS)];
        int64_t parts = digests(uint32_t(tenant), tables.history.row(rows[i]) + known, known, suffixes.parts, found);
        for (int64_t part = 0; part < parts; part++)
          visit(int32_t(i + 1), suffixes.entry(part, found[part]), tenant, found[part], given[place]);
      }
    };
    each([](int32_t i, int32_t* entry, int32_t, uint32_t, int32_t) { entry[CLAIM] = i; });
    each([](int32_t i, int32_t* entry, int32_t tenant, uint32_t digest, int32_t token) {
      if (entry[CLAIM] != i) return;
      note(entry, tenant, digest, token);
      entry[CLAIM] = 0;
    });
  }
}

void recall(
    const int32_t* rows, int64_t count, const int32_t* same, const Rows& tables, const Suffixes& suffixes,
    const Recall& asked) {
  for (int64_t i = 0; i < count; i++) {
    int32_t *own = tables.state.row(rows[i]), *end = tables.history.row(rows[i]) + own[LENGTH];
    const int32_t* settings = tables.params.row(rows[i]);
    int64_t length = own[LENGTH];
    int64_t most = std::min<int64_t>({asked.most, settings[DRAFTS], settings[MAX_LEN] - 1 - length});
    if (!own[ACTIVE] || most <= 0) continue;
    int32_t tenant = settings[TENANT];
    int64_t drafted = 0, match = same[i];
    while (tenant > 0 && drafted < most) {
      uint32_t found[std::size(LENGTHS)];
      int64_t part = digests(uint32_t(tenant), end + drafted, length + drafted, suffixes.parts, found);
      const int32_t* entry = nullptr;
      while (!entry && part--) {
        const int32_t* known = suffixes.entry(part, found[part]);
        bool often = 1000 * int64_t(known[SAME]) >= asked.least * known[SEEN];
        if (often && is_of(known, tenant, found[part])) entry = known;
      }
      if (!entry || (!drafted && LENGTHS[part] <= match)) break;
      if (!drafted) match = LENGTHS[part];
      if (drafted >= asked.factor * match / 1000) break;
      end[drafted++] = entry[NEXT];
    }
    int64_t kept = std::min<int64_t>(own[DRAFTED], length + asked.factor * same[i] / 1000);
    own[DRAFTED] = int32_t(drafted ? length + drafted : kept);
  }
}

}  // namespace gapless
