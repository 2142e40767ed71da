/** The timeline in words: the legend with each cause's share, a summary, and the longest bubbles as a table. */

import { CAUSES, WITHIN, causeOf, isBubble } from "./causes.js";
import { causeProperty } from "./colours.js";
import { el, setText } from "./dom.js";
import { count, duration, median, percent } from "./format.js";

const ROWS = 12;

export class Legend {
  /** @param {HTMLElement} root  @param {HTMLElement} mends a list of what to do about each cause */
  constructor(root, mends) {
    mends.append(...CAUSES.map(({ key, name, mend }) => el("li", {}, swatchOf(key, ""), el("b", { text: name }), `: ${mend}.`)));
    this.shares = new Map(
      CAUSES.map((cause) => {
        const share = el("span", { class: "share", text: "–" });
        const name = el("span", { text: cause.name });
        root.append(el("li", { title: cause.help }, swatchOf(cause.key, cause.mark), name, share));
        return [cause.key, share];
      }),
    );
  }

  /** @param {Map<string, number>} idle ms by cause  @param {number} span ms */
  show(idle, span) {
    for (const [key, share] of this.shares) setText(share, percent((idle.get(key) ?? 0) / span));
  }
}

/** The cause's colour, for the eye alone: its name stands beside it. */
function swatchOf(key, text) {
  return el("span", { class: `swatch ${causeProperty(key).slice(2)}`, text, "aria-hidden": "true" });
}

/** Idle time by cause within a stretch of time. @returns {Map<string, number>} */
export function idleByCause(gaps, from, to) {
  const idle = new Map();
  for (const gap of gaps) {
    const inside = Math.min(gap.end, to) - Math.max(gap.start, from);
    idle.set(gap.cause, (idle.get(gap.cause) ?? 0) + Math.max(0, inside));
  }
  return idle;
}

/** The picture in a sentence, for those who do not see it. */
export function summary(history, from, to, idle) {
  const steps = history.stepsBetween(from, to).filter((step) => step.end >= from && step.start < to);
  const ran = steps.reduce((sum, step) => sum + Math.max(0, Math.min(step.end, to) - Math.max(step.start, from)), 0);
  const busy = WITHIN.reduce((sum, key) => sum - (idle.get(key) ?? 0), ran);
  const causes = [...idle].filter(([key]) => isBubble(key)).sort((one, other) => other[1] - one[1]);
  const bubbles = causes.reduce((sum, [, ms]) => sum + ms, 0);
  const span = to - from;
  const mostly = bubbles > 0 ? `, mostly ${causeOf(causes[0][0]).name}` : "";
  const device = steps.length ? `, median ${duration(median(steps.map((step) => step.end - step.start)))}` : "";
  const missing = history.skipped ? `; ${count(history.skipped)} steps were too many to send` : "";
  return (
    `${duration(span)}: device busy ${percent(busy / span)}, bubbles ${percent(bubbles / span)}${mostly}, ` +
    `no work ${percent((idle.get("no_work") ?? 0) / span)}; ${count(steps.length)} steps${device}${missing}`
  );
}

/** The longest bubbles of a stretch of time, longest first: most are too short to matter to anybody. */
export function longestBubbles(history, from, to) {
  const bubbles = history.gapsBetween(from, to).filter((gap) => isBubble(gap.cause));
  bubbles.sort((one, other) => other.end - other.start - (one.end - one.start));
  return bubbles.slice(0, ROWS);
}

/** The longest bubbles in sight, longest first; a button shows each in the timeline. */
export class BubbleTable {
  /** @param {HTMLTableSectionElement} body  @param {(gap: any) => void} onShow */
  constructor(body, onShow) {
    this.body = body;
    this.onShow = onShow;
  }

  show(history, from, to) {
    if (this.body.contains(document.activeElement)) return; // rows must not move away while one is in use
    const gaps = longestBubbles(history, from, to);
    this.body.replaceChildren(...gaps.map((gap) => this.#row(gap, history.now)));
  }

  #row(gap, now) {
    const { name, key } = causeOf(gap.cause);
    const text = `show the bubble of step ${gap.step}`;
    const show = { type: "button", class: "small", text: "show", "aria-label": text, onclick: () => this.onShow(gap) };
    return el(
      "tr", {},
      el("td", {}, swatchOf(key, ""), name),
      el("td", { class: "num", text: duration(gap.end - gap.start) }),
      el("td", { class: "num", text: count(gap.step) }),
      el("td", { class: "num", text: duration(now - gap.end) }),
      el("td", {}, el("button", show)),
    );
  }
}
