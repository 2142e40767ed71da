/** The row of numbers, each with its last two minutes: latency first. */

import { CAUSES, isBubble } from "./causes.js";
import { Sparkline } from "./charts.js";
import { el, setText } from "./dom.js";
import { count, duration, median, percent, rate } from "./format.js";

const STEP_WINDOW_MS = 2000;
/** Samples of a share that is shown. */
const SHARE_WINDOW = 10;

/**
 * What a gauge shows: its value, a second line, the lines of its chart, and the least top of their scale.
 * @typedef {import("./samples.js").Samples} Samples
 * @typedef {{samples: Samples, event: any, steps: any[]}} Seen
 * @typedef {{value: string, note: string, chart: (number | null)[][], most?: number}} Shown
 * @typedef {{name: string, help: string, read: (seen: Seen) => Shown}} Gauge
 */

/** @type {Gauge[]} */
const GAUGES = [
  latency("First token", "ttft", "TTFT: from a request's arrival to its first token, median of the last minute", "requests"),
  latency("Between tokens", "itl", "ITL: between two deliveries of tokens of a request, median of the last minute", "times"),
  latency("In the queue", "queue", "from a request's arrival to its first step, median of the last minute", "requests"),
  {
    name: "Tokens per second",
    help: "generated tokens",
    read: ({ event, samples }) => ({
      value: rate(event.tokens_per_second), note: `${count(event.stats.steps.generation_tokens)} in all`,
      chart: [samples.last("generated", 120)],
    }),
  },
  {
    name: "Running",
    help: "requests in the batch; the dashed line are those that wait",
    read: ({ event: { stats: { queue } }, samples }) => ({
      value: count(queue.running), note: `${count(queue.waiting)} waiting`,
      chart: [samples.last("running", 120), samples.last("waiting", 120)], most: 4,
    }),
  },
  {
    name: "Bubbles",
    help: "share of the device's time in which it was idle although there was work, of the last 10 s",
    read: ({ samples }) => {
      const causes = CAUSES.filter((cause) => isBubble(cause.key)).map(({ key }) => samples.last(key, 120));
      const sums = causes[0].map((_, place) => causes.reduce((sum, values) => sum + (values[place] ?? 0), 0));
      const recent = sums.slice(-SHARE_WINDOW);
      const share = recent.reduce((sum, value) => sum + value, 0) / recent.length;
      return { value: percent(share), note: `no work ${percent(samples.mean("no_work", SHARE_WINDOW))}`, chart: [sums], most: 0.02 };
    },
  },
  {
    name: "Step on the device",
    help: "median of the last 2 s",
    read: ({ steps, samples }) => {
      const device = median(steps.map((step) => step.end - step.start));
      const host = median(steps.map((step) => step.launched - step.planning + step.committed - step.observed));
      const each = samples.last("steps", 120);
      const means = samples.last("busy", 120).map((share, place) => (share === null || !each[place] ? null : share / each[place]));
      return { value: duration(device), note: `host ${duration(host)}`, chart: [means] };
    },
  },
  {
    name: "KV pages in use",
    help: "pages that requests hold",
    read: ({ event: { stats: { pages } }, samples }) => {
      const used = pages.owned + pages.fenced;
      const total = used + pages.free + pages.cached;
      return { value: percent(used / total), note: `${count(used)} of ${count(total)}`, chart: [samples.last("kv", 120)], most: 1 };
    },
  },
];

/** @returns {Gauge} */
function latency(name, key, help, of) {
  return {
    name, help,
    read: ({ samples }) => {
      const { p50, p99, many } = samples.latency[key];
      const note = many ? `p99 ${duration((p99 ?? NaN) * 1000)}` : `no ${of} in a minute`;
      return { value: duration((p50 ?? NaN) * 1000), note, chart: [samples.last(`${key}_p99`, 120), samples.last(`${key}_p50`, 120)] };
    },
  };
}

export class Gauges {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.tiles = GAUGES.map((gauge) => {
      const spark = new Sparkline();
      const value = el("dd", { class: "value", text: "–" });
      const note = el("dd", { class: "note", text: "\u00a0" });
      root.append(el("div", { class: "gauge", title: gauge.help }, el("dt", { text: gauge.name }), value, note, spark.element));
      return { gauge, spark, value, note };
    });
    this.updates = 0;
  }

  /** @param {import("./samples.js").Samples} samples  @param {any} event the newest of the feed  @param {any} history */
  show(samples, event, history) {
    const steps = history.stepsBetween(history.now - STEP_WINDOW_MS, history.now);
    for (const { gauge, spark, value, note } of this.tiles) {
      const shown = gauge.read({ samples, event, steps });
      setText(value, shown.value);
      setText(note, shown.note);
      spark.show(shown.chart, shown.most);
    }
    this.updates += 1;
  }
}
