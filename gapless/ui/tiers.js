/** The tiers of KV pages: how full each is, how often it had what was asked for, what moves, and what it did not get. */

import { el } from "./dom.js";
import { bytes, count, percent } from "./format.js";

export class TierTable {
  /** @param {HTMLTableSectionElement} body */
  constructor(body) {
    this.body = body;
    this.updates = 0;
  }

  /** @param {any[]} tiers those of the answer of /debug/kv; without any, there is nothing to see */
  show(tiers) {
    /** @type {HTMLElement} */ (this.body.closest("section")).hidden = tiers.length === 0;
    this.body.replaceChildren(...tiers.map(row));
    this.updates += 1;
  }
}

function row(tier) {
  const size = tier.tier === "host" ? (pages) => count(pages) : bytes;
  const cells = [
    tier.size ? `${size(tier.used)} of ${size(tier.size)}${tier.tier === "host" ? " pages" : ""}` : "–",
    percent(tier.hits / (tier.hits + tier.missed)),
    count(tier.loading), count(tier.storing), bytes(tier.read_bytes), bytes(tier.written_bytes),
  ];
  const head = el("th", { scope: "row", text: tier.tier });
  return el("tr", {}, head, ...cells.map((text) => el("td", { class: "num", text })), el("td", { text: losses(tier) }));
}

function losses({ dropped, refused, late }) {
  const found = Object.entries({ ...dropped, refused, late }).filter(([, pages]) => pages > 0);
  return found.map(([why, pages]) => `${count(pages)} ${why}`).join(", ") || "–";
}
