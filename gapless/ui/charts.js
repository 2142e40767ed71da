/** Small line charts in SVG: coloured by the style sheet, so that a change of theme needs no redraw. */

import { svg } from "./dom.js";

const POINTS = 120;
const WIDTH = 120;
const HEIGHT = 24;

/** One or two lines over the last minute, the first filled. An ornament: the number beside it is the content. */
export class Sparkline {
  constructor(lines = 1) {
    this.values = Array.from({ length: lines }, () => /** @type {number[]} */ ([]));
    this.area = svg("path", { class: "area" });
    this.paths = this.values.map((_, line) => svg("path", { class: `line line-${line}` }));
    this.element = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area, ...this.paths,
    );
  }

  /** Add one value a line. The scale begins at 0 and ends at `most` or the largest value. */
  push(values, most = 0) {
    values.forEach((value, line) => {
      this.values[line].push(Number.isFinite(value) ? value : 0);
      if (this.values[line].length > POINTS) this.values[line].shift();
    });
    const top = Math.max(most, 1e-9, ...this.values.flat());
    this.paths.forEach((path, line) => path.setAttribute("d", pathOf(this.values[line], top)));
    const first = pathOf(this.values[0], top);
    this.area.setAttribute("d", `${first}V${HEIGHT}H${xOf(0, this.values[0].length)}Z`);
  }
}

/** The newest value is at the right edge, also while there are few. */
function xOf(place, many) {
  return (((POINTS - many + place) / (POINTS - 1)) * WIDTH).toFixed(1);
}

function pathOf(values, top) {
  const points = values.map((value, place) => {
    const y = HEIGHT - 1 - (value / top) * (HEIGHT - 2);
    return `${xOf(place, values.length)} ${y.toFixed(1)}`;
  });
  return `M${points.join("L")}`;
}
