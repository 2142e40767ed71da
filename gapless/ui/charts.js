/** Small line charts in SVG: coloured by the style sheet, so that a change of theme needs no redraw. */

import { svg } from "./dom.js";

const POINTS = 120;
const WIDTH = 120;
const HEIGHT = 24;

/** One or two lines over the last two minutes, the first filled. An ornament: the number beside it is the content. */
export class Sparkline {
  constructor() {
    this.area = svg("path", { class: "area" });
    this.paths = [0, 1].map((line) => svg("path", { class: `line line-${line}` }));
    this.element = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area, ...this.paths,
    );
  }

  /** Draw the newest values of each line. The scale begins at 0 and ends at `most` or the largest value. */
  show(lines, most = 0) {
    const shown = lines.map((values) => values.slice(-POINTS));
    const top = Math.max(most, 1e-9, ...shown.flat().map((value) => value ?? 0));
    shown.forEach((values, line) => this.paths[line].setAttribute("d", pathOf(values, top)));
    const first = shown[0].map((value) => value ?? 0);
    if (first.length) this.area.setAttribute("d", `${pathOf(first, top)}V${HEIGHT}H${xOf(0, first.length)}Z`);
  }
}

/** The newest value is at the right edge, also while there are few. */
function xOf(place, many) {
  return (((POINTS - many + place) / (POINTS - 1)) * WIDTH).toFixed(1);
}

/** A line with a gap wherever there is no value. */
function pathOf(values, top) {
  let pen = "M";
  return values.map((value, place) => {
    if (value === null) {
      pen = "M";
      return "";
    }
    const y = HEIGHT - 1 - (value / top) * (HEIGHT - 2);
    const point = `${pen}${xOf(place, values.length)} ${y.toFixed(1)}`;
    pen = "L";
    return point;
  }).join("");
}
