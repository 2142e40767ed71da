/** "Why is it slow?" in up to four sentences: what stands out, and what to do about it. */

import { CAUSES, isBubble } from "./causes.js";
import { el } from "./dom.js";
import { count, duration, percent } from "./format.js";

/** Samples that are looked at. */
const RECENT = 30;
const LEAST_BUBBLE = 0.03;
const BUSY = 0.9;
const FULL = 0.95;
const STALL_SECONDS = 0.5;
/** A stall is also this many times as long as the middle of all times between tokens. */
const STALL_TIMES = 10;

/**
 * @param {import("./samples.js").Samples} samples
 * @param {any} info the engine's facts, of /server_info
 * @returns {{text: string, mend: string, at?: number}[]} `at` is a moment that can be shown
 */
export function reasons(samples, info) {
  return [...stall(samples), ...queue(samples, info), ...bubbles(samples), ...device(samples)];
}

function stall(samples) {
  const longest = samples.columns.itl_max ?? [];
  const at = longest.reduce((best, value, place) => ((value ?? 0) > (longest[best] ?? 0) ? place : best), 0);
  const worst = longest[at] ?? 0;
  const usual = samples.columns.itl_p50?.filter((value) => value !== null).sort((a, b) => a - b) ?? [];
  if (!usual.length || worst < STALL_SECONDS || worst < STALL_TIMES * usual[usual.length >> 1]) return [];
  const ago = (samples.columns.time[samples.length - 1] - samples.columns.time[at]) * 1000;
  const text = `A request waited up to ${duration(worst * 1000)} for its next token, ${duration(ago)} ago`;
  return [{ text, mend: "the history shows what else happened then", at: samples.columns.time[at] }];
}

function queue(samples, info) {
  const waiting = samples.mean("waiting", RECENT);
  if (!(waiting >= 0.5)) return [];
  const kv = samples.mean("kv", RECENT);
  const text = `${count(Math.max(1, waiting))} requests wait on average`;
  if (kv > FULL) {
    return [{ text: `${text}: ${percent(kv)} of the KV pages are in use`, mend: "raise --kv-cache-memory-bytes or --gpu-memory-utilization, or add a server" }];
  }
  const running = samples.mean("running", RECENT);
  if (running < FULL * (info?.max_num_seqs ?? Infinity)) return [{ text, mend: "their prompts take turns: --max-num-batched-tokens says how much of them a step computes" }];
  return [{ text: `${text}: ${count(running)} run, as many as may`, mend: "raise --max-num-seqs, or add a server" }];
}

function bubbles(samples) {
  const shares = CAUSES.filter((cause) => isBubble(cause.key)).map((cause) => ({ cause, share: samples.mean(cause.key, RECENT) }));
  const total = shares.reduce((sum, { share }) => sum + (share || 0), 0);
  const [{ cause, share }] = shares.sort((one, other) => (other.share || 0) - (one.share || 0));
  if (!(total >= LEAST_BUBBLE)) return [];
  const text = `The device was idle ${percent(total)} of the time although there was work, mostly ${cause.name} (${percent(share)})`;
  return [{ text, mend: cause.mend }];
}

function device(samples) {
  const busy = samples.mean("busy", RECENT);
  if (!(busy > BUSY)) return [];
  return [{ text: `The device is busy ${percent(busy)} of the time`, mend: "the steps themselves take the time: fewer requests at once, a smaller model or dtype, drafts (--speculative-config), or another server" }];
}

/** The list under the numbers. */
export class Why {
  /** @param {HTMLElement} list  @param {(at: number) => void} onShow */
  constructor(list, onShow) {
    this.list = list;
    this.onShow = onShow;
    this.text = "";
  }

  show(samples, info) {
    const found = reasons(samples, info);
    if (!found.length) found.push({ text: "Nothing stands out in the last half minute", mend: "" });
    const text = found.map((one) => one.text + one.mend).join();
    if (text === this.text || this.list.contains(document.activeElement)) return;
    this.text = text;
    this.list.replaceChildren(...found.map((one) => this.#item(one)));
  }

  #item({ text, mend, at }) {
    const parts = [el("b", { text }), mend ? `: ${mend}.` : "."];
    if (at !== undefined) parts.push(" ", el("button", { type: "button", class: "small", text: "show", "aria-label": "show the stall", onclick: () => this.onShow(at) }));
    return el("li", {}, ...parts);
  }
}
