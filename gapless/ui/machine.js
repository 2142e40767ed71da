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
  ["Steps", ({ samples, stats }) => `${rate(samples.mean("steps", RECENT))} a second, ${count(stats.in_flight)} of ${count(stats.depth)} in flight`],
  ["Preemptions", ({ stats }) => (stats.preemptions ? count(stats.preemptions) : null)],
  ["Adapters", ({ info }) => (info.adapters?.length ? `${info.adapters.length}: ${info.adapters.join(", ")}` : null)],
  ["Right drafts", drafts],
  ["Forms of output", ({ stats }) => (stats.grammars_compiled + stats.grammar_hits ? `${count(stats.grammars_compiled)} compiled, ${count(stats.grammar_hits)} kept, ${count(stats.grammars_waiting)} waiting` : null)],
  ["Masks", ({ stats }) => (stats.masks ? `${Math.round(stats.mask_ns / stats.masks / 1000)} µs each, ${count(stats.held_rows)} rows held` : null)],
];

/** A place whose share falls off beside those before it is a fault of the drafter. */
function drafts({ samples, stats }) {
  if (!stats.draft_tokens) return null;
  const places = stats.verified.map((many, place) => (many ? Math.round((100 * stats.accepted[place]) / many) : "–"));
  return `${percent(samples.mean("right_drafts", RECENT))}; since the start ${places.join(" ")} % by place`;
}

export class Machine {
  /** @param {HTMLTableSectionElement} body */
  constructor(body) {
    this.rows = ROWS.map(([name, words]) => {
      const cell = el("td");
      const row = el("tr", { hidden: true }, el("th", { scope: "row", text: name }), cell);
      body.append(row);
      return { row, cell, words };
    });
  }

  /** @param {import("./samples.js").Samples} samples  @param {any} stats  @param {any} info */
  show(samples, stats, info) {
    for (const { row, cell, words } of this.rows) {
      const text = words({ samples, stats, info });
      row.hidden = text === null;
      setText(cell, text ?? "");
    }
  }
}
