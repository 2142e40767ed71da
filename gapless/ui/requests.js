/** The last requests as a waterfall: queue, prefill chunks, first token, decode. One can be shown in the timeline. */

import { el, setText, svg } from "./dom.js";
import { count, duration, rate } from "./format.js";

const WIDTH = 1000;
const HEIGHT = 14;
const LONGEST_MS = 30_000;

export class Waterfall {
  /**
   * @param {HTMLTableSectionElement} body
   * @param {HTMLElement} axis
   * @param {(request: any) => void} onChoose called with the chosen request's band, or null
   */
  constructor(body, axis, onChoose) {
    this.body = body;
    this.axis = axis;
    this.onChoose = onChoose;
    this.chosen = null;
    this.updates = 0;
    /** @type {Map<string, Row>} */
    this.rows = new Map();
  }

  /** @param {any[]} requests newest last  @param {import("./history.js").History} history */
  show(requests, history) {
    const items = requests.map((request) => inMs(request, history)).reverse();
    const to = history.now;
    const from = Math.max(to - LONGEST_MS, Math.min(to - 1, ...items.map((item) => item.arrival)));
    setText(this.axis, items.length ? `last ${duration(to - from)}` : "none");
    const kept = new Map();
    for (const item of items) kept.set(item.key, this.rows.get(item.key) ?? new Row((row) => this.#toggle(row)));
    this.rows = kept;
    for (const item of items) this.#row(item.key).show(item, from, to, item.key === this.chosen);
    this.#place([...kept.values()].map((row) => row.element));
    this.updates += 1;
  }

  clear() {
    this.chosen = null;
    for (const row of this.rows.values()) row.mark(false);
  }

  #row(key) {
    return /** @type {Row} */ (this.rows.get(key));
  }

  /** Move only what is not in its place: moving a row takes the focus away from it. */
  #place(elements) {
    const wanted = new Set(elements);
    for (const child of [...this.body.children]) if (!wanted.has(child)) child.remove();
    elements.forEach((element, place) => {
      if (this.body.children[place] !== element) this.body.insertBefore(element, this.body.children[place] ?? null);
    });
  }

  #toggle(row) {
    const { key } = row.item;
    const again = this.chosen === key;
    this.clear();
    this.chosen = again ? null : key;
    row.mark(!again);
    this.onChoose(again ? null : band(row.item));
  }
}

/** One request: made once, then changed in place. */
class Row {
  constructor(onToggle) {
    this.item = null;
    const onclick = () => onToggle(this);
    this.button = el("button", { type: "button", class: "small id", "aria-pressed": "false", onclick });
    this.state = el("td", { class: "state" });
    this.chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.numbers = ["prompt", "cached", "output", "ttft", "speed"].map((name) => el("td", { class: `num ${name}` }));
    const bar = el("td", { class: "bar" }, this.chart);
    this.element = el("tr", {}, el("td", {}, this.button), this.state, bar, ...this.numbers);
  }

  mark(chosen) {
    this.button.setAttribute("aria-pressed", String(chosen));
    this.element.classList.toggle("chosen", chosen);
  }

  show(item, from, to, chosen) {
    this.item = item;
    setText(this.button, shortId(item.request_id || item.id));
    this.button.title = namesOf(item);
    setText(this.state, item.finish_reason ?? item.state);
    this.chart.setAttribute("aria-label", words(item));
    this.chart.replaceChildren(...bars(item, from, to));
    const tokens = [item.prompt_tokens, item.cached_tokens, item.generation_tokens];
    const texts = [...tokens.map(count), duration(item.ttft), rate(item.speed)];
    this.numbers.forEach((cell, place) => setText(cell, texts[place]));
    this.mark(chosen);
  }
}

/** The request with its times in the page's milliseconds; NaN for what has not happened. */
function inMs(request, history) {
  const time = (ns) => (ns ? history.toMs(ns) : NaN);
  const chunk = ([start, end, tokens, step]) => ({ start: time(start), end: time(end), tokens, step });
  const item = {
    ...request,
    key: `${request.id} ${request.keys}`, // an answer to several prompts has one id
    arrival: time(request.arrival), started: time(request.started),
    first: time(request.first_token), last: time(request.last_token),
    chunks: (request.chunks ?? []).map(chunk),
  };
  item.ttft = item.first - item.arrival;
  item.speed = item.generation_tokens > 1 ? ((item.generation_tokens - 1) / (item.last - item.first)) * 1000 : NaN;
  item.now = history.now;
  return item;
}

function bars(item, from, to) {
  const scale = WIDTH / (to - from);
  const bar = (kind, start, end, y = 2, height = HEIGHT - 4) => {
    const left = Math.max(0, (start - from) * scale);
    const width = Math.max(1.5, (Math.min(end, to) - from) * scale - left);
    if (!(start < to && end > from)) return null; // also when one of them is not known
    return svg("rect", { class: kind, x: left.toFixed(1), y, width: width.toFixed(1), height });
  };
  const running = item.state === "running";
  const drawn = [
    bar("queue", item.arrival, Number.isNaN(item.started) ? item.now : item.started, 6, HEIGHT - 12),
    bar("prefill-wait", item.started, Number.isNaN(item.first) ? item.now : item.first, 6, HEIGHT - 12),
    bar("decode", item.first, running ? item.now : item.last),
    ...item.chunks.map((chunk) => bar("prefill", chunk.start, chunk.end)),
    bar("first", item.first, item.first, 0, HEIGHT),
  ];
  return drawn.filter((shape) => shape !== null);
}

function words(item) {
  const parts = [`queued ${duration((Number.isNaN(item.started) ? item.now : item.started) - item.arrival)}`];
  if (item.chunks.length) parts.push(`prefill in ${steps(item.chunks)}`);
  if (!Number.isNaN(item.first)) {
    parts.push(`first token after ${duration(item.ttft)}`, `decode ${duration(item.last - item.first)}`);
  }
  return parts.join(", ");
}

function steps(chunks) {
  const [first, last] = [chunks[0].step, chunks[chunks.length - 1].step];
  return chunks.length === 1 ? `step ${first}` : `${chunks.length} chunks, steps ${first} to ${last}`;
}

/** What the timeline marks: the request's time, and the steps that computed its prompt. */
function band(item) {
  const end = item.state === "done" ? item.last : item.now;
  return {
    start: item.arrival, end: Number.isNaN(end) ? item.now : end,
    steps: new Set(item.chunks.map((chunk) => chunk.step)), text: `${namesOf(item)}: ${words(item)}`,
  };
}

/** The client's own name for a request, where it gave one, and the answer's. */
function namesOf({ id, request_id }) {
  return request_id && request_id !== id ? `${request_id} (${id})` : id;
}

/** The tail tells long ones apart; their head is the same for all. */
function shortId(id) {
  return id.length > 12 ? `…${id.slice(-9)}` : id;
}
