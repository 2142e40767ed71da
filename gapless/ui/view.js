/** Which stretch of time the timeline shows. Live, its end follows the clock; held, it stays. */

const SHORTEST = 0.05;
const LONGEST = 30_000;
export const FIRST_SPAN = 2000;

export class View {
  constructor() {
    this.span = FIRST_SPAN;
    /** @type {number | null} */
    this.heldEnd = null;
  }

  get live() {
    return this.heldEnd === null;
  }

  end(edge) {
    return this.heldEnd ?? edge;
  }

  start(edge) {
    return this.end(edge) - this.span;
  }

  hold(edge) {
    this.heldEnd = this.end(edge);
  }

  follow() {
    this.heldEnd = null;
  }

  /** Zoom so that the moment at `place` (0 left .. 1 right) stays where it is. Live, the right end stays. */
  zoom(factor, place, edge) {
    const span = Math.min(LONGEST, Math.max(SHORTEST, this.span * factor));
    if (!this.live) {
      const moment = this.start(edge) + place * this.span;
      this.heldEnd = moment + (1 - place) * span;
    }
    this.span = span;
  }

  /** Move by a share of the span; moving into the past holds the view. */
  pan(share, edge) {
    this.heldEnd = Math.min(edge, this.end(edge) + share * this.span);
  }

  /** Show this stretch with some room around it. */
  show(from, to, edge) {
    this.span = Math.min(LONGEST, Math.max(SHORTEST, (to - from) * 1.3));
    this.heldEnd = Math.min(edge, (from + to) / 2 + this.span / 2);
  }
}
