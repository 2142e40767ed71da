/** The timeline: what it shows, and how pointer and keyboard move it. Drawing is in lanes_draw.js. */

import { longestBubbles } from "./bubbles.js";
import { WITHIN, causeOf } from "./causes.js";
import { duration } from "./format.js";
import { GUTTER, draw, heightOf, laneAt, lanesFor } from "./lanes_draw.js";
import { View } from "./view.js";

/** The engine may share its cores with this page. */
const FRAME_MS = 1000 / 20;
/** For those who want no motion, the picture changes once a second, at once. */
const STILL_FRAME_MS = 1000;

export class Timeline {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {import("./history.js").History} history
   * @param {{onDetail: (text: string) => void, onView: () => void}} listener
   */
  constructor(canvas, history, listener) {
    this.canvas = canvas;
    this.history = history;
    this.listener = listener;
    this.view = new View();
    this.frames = 0;
    this.request = null;
    this.chosenStep = null;
    this.chosenGap = null;
    this.#still = matchMedia("(prefers-reduced-motion: reduce)");
    this.#follow();
    this.#listen();
  }

  #still;
  #visible = false;
  #drawnAt = -Infinity;
  #asked = 0;
  /** @type {{x: number, moved: boolean} | null} */
  #drag = null;

  get #lanes() {
    return lanesFor(this.history.copies, this.history.ranks);
  }

  get edge() {
    return this.history.edge(performance.now());
  }

  /** The stretch of time shown now. */
  get range() {
    const edge = this.edge;
    return { from: this.view.start(edge), to: this.view.end(edge), edge };
  }

  get paused() {
    return !this.view.live;
  }

  togglePause() {
    if (this.view.live) this.view.hold(this.edge);
    else this.view.follow();
    this.#changed();
  }

  zoom(factor, place = 0.5) {
    this.view.zoom(factor, place, this.edge);
    this.#changed();
  }

  pan(share) {
    this.view.pan(share, this.edge);
    this.#changed();
  }

  /** Mark a request, and hold the view where it can be seen. */
  showRequest(request) {
    this.request = request;
    if (request) this.view.show(request.start, request.end, this.edge);
    this.#changed();
  }

  /** Hold the view around one bubble and tell what it is. */
  showGap(gap) {
    this.#choose(null, gap);
    const around = Math.max(20 * (gap.end - gap.start), 5);
    this.view.show(gap.start - around / 2, gap.end + around / 2, this.edge);
    this.#changed();
  }

  /** Draw soon, even when nothing moves. */
  redraw() {
    this.#drawnAt = -Infinity;
    this.#ask();
  }

  /** Draws only what is in sight. */
  #follow() {
    new IntersectionObserver((entries) => {
      this.#visible = entries[entries.length - 1].isIntersecting;
      this.#ask();
    }).observe(this.canvas);
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    document.addEventListener("visibilitychange", () => this.#ask());
  }

  #ask() {
    if (this.#asked || !this.#visible || document.hidden) return;
    this.#asked = requestAnimationFrame((time) => this.#frame(time));
  }

  #frame(time) {
    this.#asked = 0;
    const least = this.#still.matches ? STILL_FRAME_MS : FRAME_MS;
    // A held picture is drawn when it changes; 2 ms of slack, or a 60 Hz screen would give 15 frames for 20.
    if (time - this.#drawnAt >= (this.paused ? Infinity : least - 2)) {
      this.#draw();
      this.#drawnAt = time;
    }
    if (!this.paused) this.#ask();
  }

  #draw() {
    const { from, to, edge } = this.range;
    const lanes = this.#lanes;
    const { ctx, width, height } = this.#fit(heightOf(lanes));
    // Whole pixels only: a window that slides by parts of one makes every bar shimmer.
    const pixel = (to - from) / (width - GUTTER);
    const start = this.paused ? from : Math.floor(from / pixel) * pixel;
    const steps = this.history.stepsBetween(start, to);
    const gaps = this.history.gapsBetween(start, to);
    const copies = this.history.copiesBetween(start, to);
    const { chosenStep, chosenGap, request } = this;
    const shown = { steps, gaps, copies, chosenStep, chosenGap, request };
    draw(ctx, { width, height, from: start, to: start + (to - from), edge, lanes, ...shown });
    this.frames += 1;
  }

  #fit(height) {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const ratio = window.devicePixelRatio;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
      canvas.style.height = `${height}px`;
    }
    const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    return { ctx, width, height };
  }

  #changed() {
    this.history.keepFrom = this.paused ? this.range.from : Infinity;
    this.redraw();
    this.listener.onView();
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerup", () => (this.#drag = null));
    canvas.addEventListener("pointercancel", () => (this.#drag = null));
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1),
      ArrowUp: () => this.#walk(-1), ArrowDown: () => this.#walk(1),
      End: () => this.#backToLive(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #backToLive() {
    this.view.follow();
    this.#changed();
  }

  /** Forget what was chosen. */
  clear() {
    this.request = null;
    this.#choose(null, null);
    this.listener.onDetail("");
    this.listener.onView();
  }

  /** To the long bubble before or after the chosen one; at first, to the newest. */
  #walk(direction) {
    this.view.hold(this.edge);
    const { from, to } = this.range;
    const gaps = longestBubbles(this.history, from, to).sort((one, other) => one.start - other.start);
    const at = gaps.indexOf(this.chosenGap);
    const next = at < 0 ? gaps.length - 1 : Math.min(gaps.length - 1, Math.max(0, at + direction));
    if (gaps.length) this.#choose(null, gaps[next]);
    this.#changed();
  }

  #wheel(event) {
    // A page that eats every turn of the wheel cannot be scrolled past: zoom is for the timeline in use.
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 1000);
    else this.zoom(Math.exp(event.deltaY / 400), this.#place(event));
  }

  #down(event) {
    this.#drag = { x: event.clientX, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  #move(event) {
    const drag = this.#drag;
    if (drag && (drag.moved || Math.abs(event.clientX - drag.x) > 3)) {
      this.pan((drag.x - event.clientX) / (this.canvas.clientWidth - GUTTER));
      this.#drag = { x: event.clientX, moved: true };
    } else {
      this.#point(event);
    }
  }

  #place(event) {
    const width = this.canvas.clientWidth - GUTTER;
    return Math.min(1, Math.max(0, (event.offsetX - GUTTER) / width));
  }

  /** Find what is under the pointer; 2 pixels of reach, since steps may be narrower than one. */
  #point(event) {
    const { from } = this.range;
    const lane = laneAt(this.#lanes, event.offsetY);
    const moment = from + this.#place(event) * this.view.span;
    const reach = (this.view.span / this.canvas.clientWidth) * 2;
    const near = lane?.kind === "compute" ? this.history.gapsBetween(moment - reach, moment + reach) : [];
    const gap = nearest(near, moment);
    const [first, last] = lane?.spans?.length ? [moment - reach, moment + reach] : [moment, moment];
    const spans = lane?.spans ?? ((step) => [step.start, step.end]);
    const step = this.history.stepsBetween(first, last).find((one) => {
      const [start, end] = spans(one);
      return start <= last && end >= first;
    });
    this.#choose(gap ? null : step ?? null, gap);
  }

  #choose(step, gap) {
    this.chosenStep = step ? step.step : null;
    this.chosenGap = gap;
    if (gap) this.listener.onDetail(gapText(gap));
    else if (step) this.listener.onDetail(stepText(step));
    this.redraw();
  }
}

function nearest(gaps, moment) {
  const distance = (gap) => Math.abs((gap.start + gap.end) / 2 - moment);
  return gaps.sort((one, other) => distance(one) - distance(other))[0] ?? null;
}

export function gapText(gap) {
  const { name, help, mend } = causeOf(gap.cause);
  const where = WITHIN.includes(gap.cause) ? "in" : "before";
  const idle = `${name}: device idle ${duration(gap.end - gap.start)} ${where} step ${gap.step}`;
  return help ? `${idle} (${help}). What to do: ${mend}.` : idle;
}

function stepText(step) {
  const held = [`${step.rows} decode rows`, `${step.chunk} prefill tokens`, `${step.inFlight} in flight`];
  const times = [
    `plan ${duration(step.planned - step.planning)}`, `pack ${duration(step.packed - step.planned)}`,
    `launch ${duration(step.launched - step.packed)}`, `device ${duration(step.end - step.start)}`,
    `wait ${duration(step.waited ? step.observed - step.observing : 0)}`,
    `commit ${duration(step.committed - step.observed)}`,
    ...step.waits.map((wait, rank) => `rank ${rank} waited ${duration(wait)}`),
  ];
  return `step ${step.step}: ${held.join(", ")}; ${times.join(", ")}`;
}
