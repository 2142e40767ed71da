/** The last half hour as charts with one time axis (uPlot): drag to zoom, a range button goes back to now. */

import { CAUSES, isBubble } from "./causes.js";
import { causeProperty, colour } from "./colours.js";
import { el, setText } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";

const HEIGHT = 150;
const RANGES = [1, 5, 15, 30];
const SHORTEST_SECONDS = 5;
const FONT = "11px system-ui, sans-serif";
const BUBBLES = CAUSES.filter((cause) => isBubble(cause.key));

const ms = (value) => duration(value * 1000);

/**
 * `stacked` lines lie on each other; what the legend shows is always the column's own value.
 * @typedef {{label: string, column: string, property: string, dash?: number[]}} Line
 * @type {{title: string, lines: Line[], words: (value: number) => string, log?: boolean, stacked?: boolean, least?: number}[]}
 */
const CHARTS = [
  {
    title: "Latency", words: ms, log: true,
    lines: [
      { label: "first token p99", column: "ttft_p99", property: "--prefill" },
      { label: "p50", column: "ttft_p50", property: "--prefill", dash: [4, 3] },
      { label: "token gap p99", column: "itl_p99", property: "--accent" },
      { label: "p50", column: "itl_p50", property: "--accent", dash: [4, 3] },
      { label: "longest", column: "itl_max", property: "--cause-host-late" },
      { label: "queue p99", column: "queue_p99", property: "--muted" },
    ],
  },
  {
    title: "Tokens per second", words: rate, least: 1,
    lines: [
      { label: "generated", column: "generated", property: "--accent" },
      { label: "prompt", column: "prompt", property: "--prefill" },
    ],
  },
  {
    title: "Requests", words: count, least: 1,
    lines: [
      { label: "running", column: "running", property: "--accent" },
      { label: "waiting", column: "waiting", property: "--cause-graph-miss" },
    ],
  },
  {
    title: "Bubbles, share of the device's time", words: percent, stacked: true, least: 0.02,
    lines: [
      ...BUBBLES.map(({ key, name }) => ({ label: name, column: key, property: causeProperty(key) })),
    ],
  },
];

export class Trends {
  /**
   * @param {HTMLElement} root
   * @param {HTMLElement} tools where the buttons of the ranges go
   * @param {import("./samples.js").Samples} samples
   */
  constructor(root, tools, samples) {
    this.samples = samples;
    this.minutes = 15;
    /** The stretch that is held, in epoch seconds; null while the charts follow the clock. @type {[number, number] | null} */
    this.held = null;
    this.updates = 0;
    this.buttons = RANGES.map((minutes) => el("button", { type: "button", text: `${minutes} min`, onclick: () => this.follow(minutes) }));
    tools.append(...this.buttons);
    this.charts = CHARTS.map((chart) => this.#make(root, chart));
    root.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#fit()).observe(root);
    this.#press();
  }

  follow(minutes) {
    this.minutes = minutes;
    this.held = null;
    this.#press();
    this.show();
  }

  /** Show a stretch of time. */
  hold(from, to) {
    const short = Math.max(0, SHORTEST_SECONDS - (to - from)) / 2;
    this.held = [from - short, to + short];
    this.#press();
    this.show();
  }

  show() {
    const { time } = this.samples.columns;
    if (!time?.length) return;
    const [min, max] = this.range;
    for (const { plot, chart } of this.charts) {
      plot.batch(() => {
        plot.setData([time, ...dataOf(chart, this.samples.columns)], false);
        plot.setScale("x", { min, max });
        if (plot.cursor.left < 0) plot.setLegend({ idx: time.length - 1 }, false);
      });
      setLabel(plot, chart, this.samples);
    }
    this.updates += 1;
  }

  redraw() {
    for (const { plot } of this.charts) plot.redraw();
  }

  /** The stretch that is shown, in epoch seconds. */
  get range() {
    const { time } = this.samples.columns;
    const now = time[time.length - 1];
    // A server that has run for less is shown from its start.
    return this.held ?? [Math.max(now - this.minutes * 60, Math.min(time[0], now - RANGES[0] * 60)), now];
  }

  #press() {
    this.buttons.forEach((button, place) => {
      button.setAttribute("aria-pressed", String(!this.held && RANGES[place] === this.minutes));
    });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.samples.length) return;
    const [from, to] = this.range;
    const span = to - from;
    const act = {
      ArrowLeft: () => this.hold(from - span / 10, to - span / 10), ArrowRight: () => this.hold(from + span / 10, to + span / 10),
      "+": () => this.hold(from + span / 4, to - span / 4), "-": () => this.hold(from - span / 2, to + span / 2),
      End: () => this.follow(this.minutes),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #make(root, chart) {
    const box = el("figure", { class: "trend" }, el("figcaption", { text: chart.title }));
    root.append(box);
    const plot = new window.uPlot(this.#options(chart, box), [[], ...chart.lines.map(() => [])], box);
    return { plot, chart, box };
  }

  #options(chart, box) {
    const plain = { stroke: () => colour("--muted"), font: FONT, ticks: { show: false }, grid: { stroke: () => colour("--line"), width: 1 } };
    return {
      width: Math.max(200, box.clientWidth), height: HEIGHT, padding: [6, 8, 0, 0],
      // A drag is one chart's alone: the others would zoom again into what it chose.
      cursor: { sync: { key: "trends", filters: { pub: (type) => type.startsWith("mousemove") || type === "mouseleave" } }, y: false, drag: { x: true, y: false, setScale: false }, points: { size: 5 } },
      scales: { x: { time: true, auto: false }, y: chart.log ? { distr: 3, range: decades } : { range: (_, __, most) => [0, Math.max(chart.least ?? 0, most ?? 0) * 1.05] } },
      axes: [
        { ...plain, size: 22, space: 60, values: (_, moments) => moments.map(clock) },
        { ...plain, size: 52, space: 24, splits: chart.log ? powers : undefined, values: (_, values) => values.map((value) => (value === null ? null : chart.words(value))) },
      ],
      series: [{ label: "at", value: (_, moment) => (moment ? clock(moment, true) : "–") }, ...chart.lines.map((line, place) => this.#series(chart, line, place))],
      hooks: { setSelect: [(plot) => this.#select(plot)] },
    };
  }

  #series(chart, line, place) {
    return {
      label: line.label, width: chart.stacked ? 0 : 1.5, dash: line.dash, points: { show: false },
      stroke: () => colour(line.property), fill: chart.stacked ? () => colour(line.property) : undefined,
      value: (plot, _, __, at) => {
        const own = this.samples.columns[chart.lines[place].column]?.[at];
        return own === null || own === undefined ? "–" : chart.words(own);
      },
    };
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width > 3) this.hold(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  #fit() {
    for (const { plot, box } of this.charts) {
      if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: HEIGHT });
    }
  }
}

/** Columns as they are drawn: stacked lines as sums, largest first, so that each is painted over the one behind it. */
function dataOf(chart, columns) {
  const own = chart.lines.map((line) => columns[line.column]);
  if (!chart.stacked) return own;
  const sums = own.map((values) => values.slice());
  for (let place = sums.length - 2; place >= 0; place -= 1) {
    const behind = sums[place + 1];
    sums[place] = sums[place].map((value, at) => (value === null ? null : value + (behind[at] ?? 0)));
  }
  return sums;
}

/** The chart in words, for those who do not see it. */
function setLabel(plot, chart, samples) {
  const parts = chart.lines.map(({ label, column }) => {
    const [value] = samples.last(column, 1);
    return `${label} ${value === null ? "–" : chart.words(value)}`;
  });
  plot.over.setAttribute("role", "img");
  plot.over.setAttribute("aria-label", `${chart.title}, now: ${parts.join(", ")}`);
}

/** Whole powers of ten around the values. */
function decades(_, least, most) {
  if (!(most > 0)) return [0.001, 1];
  return [10 ** Math.floor(Math.log10(least)), 10 ** Math.max(Math.ceil(Math.log10(most)), Math.floor(Math.log10(least)) + 1)];
}

/** The powers of ten between two of them. */
function powers(_, __, least, most) {
  const first = Math.round(Math.log10(least));
  return Array.from({ length: Math.round(Math.log10(most)) - first + 1 }, (___, place) => 10 ** (first + place));
}

function clock(seconds, whole = false) {
  const text = new Date(seconds * 1000).toTimeString();
  return text.slice(0, whole || seconds % 60 ? 8 : 5);
}
