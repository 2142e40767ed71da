/** The map of KV pages: one cell a page, or a few pages a cell where there are too many. */

import { colour } from "./colours.js";
import { el, setText } from "./dom.js";
import { count, percent } from "./format.js";

/** Later states hide earlier ones in a cell of several pages: what is in use matters most. */
const STATES = [
  { letter: "f", key: "free", help: "holds nothing" },
  { letter: "c", key: "cached", help: "holds a prefix that may be used again; no request has it" },
  { letter: "o", key: "owned", help: "belongs to a running request, or is being stored or loaded" },
  { letter: "x", key: "fenced", help: "given up, but a step in flight can still reach it" },
];
const RANK = new Map(STATES.map((state, rank) => [state.letter, rank]));
const SMALLEST = 4;
const LARGEST = 14;
const HEIGHT = 150;

export class PageMap {
  /** @param {HTMLCanvasElement} canvas  @param {HTMLElement} legend */
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.report = null;
    this.updates = 0;
    this.counts = new Map(
      STATES.map((state) => {
        const number = el("span", { class: "share", text: "–" });
        const swatch = el("span", { class: `swatch page-${state.key}`, "aria-hidden": "true" });
        legend.append(el("li", { title: state.help }, swatch, el("span", { text: state.key }), number));
        return [state.key, number];
      }),
    );
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  /** @param {any} report the answer of /debug/kv */
  show(report) {
    this.report = report;
    for (const [key, number] of this.counts) setText(number, count(report.counts[key]));
    const parts = STATES.map((state) => `${report.counts[state.key]} ${state.key}`).join(", ");
    this.canvas.setAttribute("aria-label", `${report.pages} KV pages of ${report.page_size} tokens: ${parts}`);
    this.redraw();
    this.updates += 1;
  }

  /** Share of pages that requests hold. */
  caption() {
    const { pages, page_size, counts } = this.report;
    return `${count(pages)} pages of ${page_size} tokens, ${percent((counts.owned + counts.fenced) / pages)} in use`;
  }

  redraw() {
    if (!this.report || !this.canvas.clientWidth) return;
    const width = this.canvas.clientWidth;
    const { size, perCell } = layout(this.report.map.length, width);
    const cells = cellsOf(this.report.map, perCell);
    const columns = Math.floor(width / size);
    const height = Math.ceil(cells.length / columns) * size;
    const ratio = window.devicePixelRatio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const ctx = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    ctx.scale(ratio, ratio);
    STATES.forEach((state, rank) => {
      ctx.beginPath();
      cells.forEach((cell, place) => {
        if (cell === rank) ctx.rect((place % columns) * size, Math.floor(place / columns) * size, size - 1, size - 1);
      });
      ctx.fillStyle = colour(`--page-${state.key}`);
      ctx.fill();
    });
  }
}

/** Cells as large as fit into the map's height; when even the smallest do not, several pages share one. */
function layout(pages, width) {
  for (let size = LARGEST; size >= SMALLEST; size -= 1) {
    if (Math.ceil(pages / Math.floor(width / size)) * size <= HEIGHT) return { size, perCell: 1 };
  }
  const room = Math.floor(width / SMALLEST) * Math.floor(HEIGHT / SMALLEST);
  return { size: SMALLEST, perCell: Math.ceil(pages / room) };
}

function cellsOf(map, perCell) {
  const cells = new Uint8Array(Math.ceil(map.length / perCell));
  for (let page = 0; page < map.length; page += 1) {
    const cell = Math.floor(page / perCell);
    cells[cell] = Math.max(cells[cell], RANK.get(map[page]) ?? 0);
  }
  return cells;
}
