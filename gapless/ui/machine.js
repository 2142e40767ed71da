/** What the machine, its memory and the optional parts of the engine do, in a table. */

import { el, setText } from "./dom.js";
import { bytes, count, percent, rate } from "./format.js";

const RECENT = 10;
const WIDTHS = { float32: 4, bfloat16: 2, float16: 2 };

/**
 * Rows: a name, and what it says; null leaves it out.
 * @typedef {import("./samples.js").Samples} Samples
 * @typedef {{samples: Samples, stats: any, info: any}} Seen
 * @type {[string, (seen: Seen) => string | null][]}
 */
const ROWS = [
  ["Processors of the host", ({ samples }) => percent(samples.mean("cpu", RECENT))],
  ["Memory of the host", ({ samples: { memory } }) => `${bytes(memory.total - memory.free)} of ${bytes(memory.total)}`],
  ["Held by the engine", ({ samples: { memory } }) => (memory.engine ? bytes(memory.engine) : null)],
  ["Held by the server", ({ samples: { memory } }) => (memory.server ? bytes(memory.server) : null)],
  ["Weights", ({ info }) => (info.dtype in WIDTHS ? `${bytes(info.parameters * WIDTHS[info.dtype])} in ${info.dtype}` : null)],
  ["KV pages", ({ samples: { memory }, info }) => (memory.kv ? `${bytes(memory.kv)} on ${info.device}` : null)],
  ["Steps", ({ samples, stats }) => `${rate(samples.mean("steps", RECENT))} a second, ${count(stats.queue.in_flight)} of ${count(stats.queue.depth)} in flight`],
  ["Ranks", ({ stats, info }) => (info.ranks > 1 ? `${info.ranks}, ${stats.ranks.lag.slice(1).map(count).join(", ")} steps behind` : null)],
  ["Adapters", ({ info }) => (info.adapters?.length ? `${info.adapters.length}: ${info.adapters.join(", ")}` : null)],
  ["Right drafts", drafts],
  ["Forms of output", ({ stats: { grammars } }) => (grammars.compiled + grammars.hits ? `${count(grammars.compiled)} compiled, ${count(grammars.hits)} kept, ${count(grammars.waiting)} waiting` : null)],
  ["Masks", ({ stats: { masks } }) => (masks.written ? `${Math.round(masks.ns / masks.written / 1000)} µs each` : null)],
];

/** A place whose share falls off beside those before it is a fault of the drafter. */
function drafts({ samples, stats: { drafts: { verified, accepted } } }) {
  if (!verified[0]) return null;
  const places = verified.map((many, place) => (many ? Math.round((100 * accepted[place]) / many) : "–"));
  return `${percent(samples.mean("right_drafts", RECENT))}; since the start ${places.join(" ")} % by place`;
}

export class Machine {
  /** @param {HTMLTableSectionElement} body */
  constructor(body) {
    this.body = body;
    this.rows = ROWS.map(([name, words]) => ({ ...this.#row(name), words }));
    this.counts = {};
  }

  /** `event.counts` are the numbers with a title in the table of metrics; zeros are left out.
   * @param {import("./samples.js").Samples} samples  @param {any} event  @param {any} info */
  show(samples, event, info) {
    for (const { words, ...cells } of this.rows) this.#write(cells, words({ samples, stats: event.stats, info }));
    for (const [title, number] of Object.entries(event.counts)) {
      this.counts[title] ??= this.#row(title[0].toUpperCase() + title.slice(1));
      this.#write(this.counts[title], number ? count(number) : null);
    }
  }

  #row(name) {
    const cell = el("td");
    const row = el("tr", { hidden: true }, el("th", { scope: "row", text: name }), cell);
    this.body.append(row);
    return { row, cell };
  }

  #write({ row, cell }, text) {
    row.hidden = text === null;
    setText(cell, text ?? "");
  }
}
