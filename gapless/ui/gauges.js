/** The row of numbers: each with its last minute. */

import { isBubble } from "./causes.js";
import { Sparkline } from "./charts.js";
import { el, setText } from "./dom.js";
import { count, duration, median, percent, rate } from "./format.js";

const STEP_WINDOW_MS = 2000;

/**
 * What a gauge makes of a sample: the value shown, a second line, and the numbers of its chart.
 * @typedef {{event: any, before: any, steps: any[]}} Sample
 * @typedef {{value: string, note: string, chart: number[], most?: number}} Shown
 * `when` says from which sample on a gauge is there at all.
 * @typedef {{name: string, lines?: number, when?: (s: Sample) => boolean, read: (s: Sample) => Shown}} Gauge
 */

/** @type {Gauge[]} */
const GAUGES = [
  {
    name: "Tokens per second",
    read: ({ event }) => ({
      value: rate(event.tokens_per_second), note: `${count(event.stats.generation_tokens)} in all`,
      chart: [event.tokens_per_second],
    }),
  },
  {
    name: "Running",
    lines: 2,
    read: ({ event: { stats } }) => ({
      value: count(stats.running), note: `${count(stats.waiting)} waiting`,
      chart: [stats.running, stats.waiting], most: 4,
    }),
  },
  {
    name: "Bubbles",
    read: (sample) => {
      const { bubbles, nothing } = idleShares(sample);
      const note = `of device time; no work ${percent(nothing)}`;
      return { value: percent(bubbles), note, chart: [bubbles], most: 0.02 };
    },
  },
  {
    name: "Step on the device",
    read: ({ steps }) => {
      const device = median(steps.map((step) => step.end - step.start));
      const host = median(steps.map((step) => step.launched - step.planning + step.committed - step.observed));
      return { value: duration(device), note: `host ${duration(host)}`, chart: [device] };
    },
  },
  {
    name: "Steps in flight",
    read: ({ event, before, steps }) => {
      const depth = Math.max(0, ...steps.map((step) => step.inFlight));
      const seconds = (event.now - before.now) / 1e9;
      const each = (event.stats.steps - before.stats.steps) / seconds;
      return { value: count(depth), note: `${rate(each)} steps/s`, chart: [depth], most: 4 };
    },
  },
  {
    name: "KV pages in use",
    read: ({ event: { stats } }) => {
      const used = stats.pages_owned + stats.pages_fenced;
      const share = used / stats.pages_total;
      return { value: percent(share), note: `${count(used)} of ${count(stats.pages_total)}`, chart: [share], most: 1 };
    },
  },
  {
    name: "Right drafts",
    when: ({ event }) => event.stats.draft_tokens > 0,
    read: ({ event: { stats }, before }) => {
      const from = stats.draft_tokens > before.stats.draft_tokens ? before.stats : { verified: [], accepted: [] };
      const [verified, right] = ["verified", "accepted"].map((name) =>
        stats[name].map((tokens, place) => tokens - (from[name][place] ?? 0)),
      );
      const share = sum(right) / sum(verified);
      // A place whose share falls off beside those before it is a fault of the drafter.
      const places = right.map((tokens, place) => (verified[place] ? Math.round((100 * tokens) / verified[place]) : "–"));
      return { value: percent(share), note: `${places.join(" ")} % by place`, chart: [share], most: 1 };
    },
  },
];

export class Gauges {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.tiles = GAUGES.map((gauge) => {
      const spark = new Sparkline(gauge.lines);
      const value = el("dd", { class: "value", text: "–" });
      const note = el("dd", { class: "note" });
      const tile = el("div", { class: "gauge" }, el("dt", { text: gauge.name }), value, note, spark.element);
      if (!gauge.when) root.append(tile);
      return { gauge, spark, value, note, tile };
    });
    this.root = root;
    this.updates = 0;
    this.before = null;
  }

  /** Show the newest event; rates are over the time since the last call. */
  show(event, history) {
    const before = this.before ?? event;
    this.before = event;
    if (before.now >= event.now) return;
    const steps = history.stepsBetween(history.now - STEP_WINDOW_MS, history.now);
    for (const { gauge, spark, value, note, tile } of this.tiles) {
      if (!tile.isConnected) {
        if (!gauge.when({ event, before, steps })) continue;
        this.root.append(tile);
      }
      const shown = gauge.read({ event, before, steps });
      setText(value, shown.value);
      setText(note, shown.note);
      spark.push(shown.chart, shown.most);
    }
    this.updates += 1;
  }
}

function sum(values) {
  return values.reduce((all, value) => all + value, 0);
}

/** Shares of the time between two events in which the device was idle, with work and without. */
function idleShares({ event, before }) {
  const wall = event.totals.wall_ns - before.totals.wall_ns;
  let bubbles = 0;
  let nothing = 0;
  for (const [key, ns] of Object.entries(event.totals.idle_ns)) {
    const share = (ns - (before.totals.idle_ns[key] ?? 0)) / wall;
    if (isBubble(key)) bubbles += share;
    else nothing += share;
  }
  return { bubbles: Math.max(0, bubbles), nothing: Math.max(0, nothing) };
}
