/** The last minute of steps, gaps and copies, in milliseconds since the first event, and the engine's clock. */

const KEPT_MS = 60_000;
const KEPT_STEPS = 30_000;
/** How far behind the engine's clock the page shows: records come in batches, and only once committed. */
const BEHIND_MS = 250;

/**
 * @typedef {{step: number, rows: number, chunk: number, inFlight: number, planning: number, planned: number,
 *   packed: number, launched: number, start: number, end: number, home: number, observing: number,
 *   observed: number, committed: number, waited: boolean, waits: number[]}} Step
 * @typedef {{start: number, end: number, cause: string, step: number}} Gap
 * @typedef {{lane: string, start: number, end: number}} Copy
 */

export class History {
  /** @type {Step[]} */
  steps = [];
  /** @type {Gap[]} */
  gaps = [];
  /** @type {Copy[]} */
  copies = [];
  /** Steps that the server left out. */
  skipped = 0;
  /**
   * Idle since the last step, with nothing to do: the engine tells such a gap only when a next step has ended it.
   * @type {Gap | null}
   */
  rest = null;
  /** The engine's time of the newest event. */
  now = -Infinity;
  /** Nothing that ends after this is dropped: a paused view holds on to what it shows. */
  keepFrom = Infinity;
  #columns = {};
  #origin = NaN;
  #offset = Infinity;

  /** Take one event of the feed that arrived at `arrival`, ms of this page's clock. */
  add(event, arrival) {
    // A clock that jumps back is another machine's: the server behind this address is another one.
    if (!(this.toMs(event.now) >= this.now - 1000)) this.#begin(event.now);
    this.now = this.toMs(event.now);
    // The earliest arrival is the truest; a little slack lets the estimate follow a drifting clock.
    this.#offset = Math.min(arrival - this.now, this.#offset + 1);
    if (event.columns) this.#columns = Object.fromEntries(event.columns.map((name, place) => [name, place]));
    for (const values of event.steps ?? []) {
      this.steps.push(this.#step(values));
      this.copies.push(...this.#copies(values));
    }
    for (const [start, end, cause, step] of event.gaps ?? []) {
      this.gaps.push({ ...this.#span(start, end), cause, step });
    }
    this.skipped += event.skipped ?? 0;
    this.rest = this.#restAt(event.stats);
    this.#trim();
  }

  /** The newest moment to show when the page's clock says `arrival`. */
  edge(arrival) {
    return Number.isFinite(this.#offset) ? arrival - this.#offset - BEHIND_MS : 0;
  }

  /** Engine time in ns to this history's ms. */
  toMs(ns) {
    return (ns - this.#origin) / 1e6;
  }

  /** Ranks that the newest step ran on; 0 for one alone. */
  get ranks() {
    return this.steps[this.steps.length - 1]?.waits.length ?? 0;
  }

  /** Steps of which anything is between two moments. */
  stepsBetween(from, to) {
    return between(this.steps, from, to, "planning", "committed");
  }

  /** Gaps likewise, with the one that has not ended yet. */
  gapsBetween(from, to) {
    const found = between(this.gaps, from, to, "start", "end");
    return this.rest && this.rest.start < to && this.rest.end >= from ? [...found, this.rest] : found;
  }

  /** Copies likewise. Those of both directions are in no common order, so no search by halves finds them. */
  copiesBetween(from, to) {
    return this.copies.filter((copy) => copy.start < to && copy.end >= from);
  }

  #restAt(stats) {
    const last = this.steps[this.steps.length - 1];
    if (!last || !stats || stats.queue.running || stats.queue.waiting || stats.queue.in_flight) return null;
    return { start: last.end, end: this.now, cause: "no_work", step: last.step + 1 };
  }

  #begin(origin) {
    this.#origin = origin;
    this.#offset = Infinity;
    [this.steps, this.gaps, this.copies] = [[], [], []];
  }

  #span(start, end) {
    return { start: this.toMs(start), end: this.toMs(end) };
  }

  #step(values) {
    const at = (name) => values[this.#columns[name]];
    const time = (name) => this.toMs(at(name));
    return {
      step: at("step"), rows: at("decode_rows"), chunk: at("chunk_tokens"), inFlight: at("in_flight"),
      planning: time("planning_at"), planned: time("planned_at"), packed: time("packed_at"),
      launched: time("launched_at"), start: time("device_start"), end: time("device_end"), home: time("home_at"),
      observing: time("observing_at"), observed: time("observed_at"), committed: time("committed_at"),
      waited: Boolean(at("waited")), waits: at("waits")?.length ? [at("ranks_ns"), ...at("waits")].map((ns) => ns / 1e6) : [],
    };
  }

  /** The copies of pages that ended before a step was launched. @returns {Copy[]} */
  #copies(values) {
    return [["in", "loads"], ["out", "stores"]]
      .map(([lane, name]) => [lane, ...["from", "until"].map((end) => values[this.#columns[`${name}_${end}`]])])
      .filter(([, , until]) => until > 0)
      .map(([lane, from, until]) => ({ lane, ...this.#span(from, until) }));
  }

  #trim() {
    const from = Math.min(this.now - KEPT_MS, this.keepFrom);
    this.steps = since(this.steps, from, "committed");
    this.gaps = since(this.gaps, from, "end");
    this.copies = since(this.copies, from, "end");
  }
}

/** What ends at `from` or later, and not too much of it; cut in lots, so that an event does not move a minute. */
function since(items, from, last) {
  const many = Math.max(firstEnding(items, from, last), items.length - KEPT_STEPS);
  return many > 500 ? items.slice(many) : items;
}

/** Items are in order of time, and so are both their ends. */
function between(items, from, to, first, last) {
  let end = firstEnding(items, from, last);
  const start = end;
  while (end < items.length && items[end][first] < to) end += 1;
  return items.slice(start, end);
}

/** Place of the first item that ends at `time` or later. */
function firstEnding(items, time, last) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle][last] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}
