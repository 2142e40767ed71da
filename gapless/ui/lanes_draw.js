/** Draws the timeline: host phases, compute with its bubbles, copies, and what each step held. */

import { CAUSES, causeOf } from "./causes.js";
import { causeProperty, colour } from "./colours.js";
import { cover } from "./coverage.js";
import { duration } from "./format.js";

export const GUTTER = 92;
const AXIS = 18;
const GAP = 3;
const LINE = 12;
/** Pixels. However short, a bubble can be seen. */
const LEAST_BUBBLE = 1;

/** @typedef {{name: string, height: number, kind: string, spans?: (s: any) => number[], property?: string}} Lane */

/** @type {Lane[]} */
const HOST = [
  { name: "plan", height: 13, kind: "phase", property: "--host", spans: (s) => [s.planning, s.planned] },
  { name: "pack", height: 13, kind: "phase", property: "--host", spans: (s) => [s.planned, s.packed] },
  { name: "launch", height: 13, kind: "phase", property: "--host", spans: (s) => [s.packed, s.launched] },
  { name: "wait", height: 13, kind: "phase", property: "--wait", spans: (s) => [s.observing, s.observed] },
  { name: "commit", height: 13, kind: "phase", property: "--host", spans: (s) => [s.observed, s.committed] },
];
/** @type {Lane[]} */
const DEVICE = [
  { name: "compute", height: 44, kind: "compute", spans: (s) => [s.start, s.end] },
  { name: "tokens on host", height: 13, kind: "phase", property: "--copy", spans: (s) => [s.end, s.home] },
];
/** @type {Lane[]} */
const BATCH = [
  { name: "decode rows", height: 28, kind: "rows", property: "--decode" },
  { name: "prefill tokens", height: 28, kind: "chunk", property: "--prefill" },
];

/** The largest value in sight, which is the scale of a lane. */
const MOST = {
  rows: (picture) => Math.max(0, ...picture.steps.map((step) => step.rows)),
  chunk: (picture) => Math.max(0, ...picture.steps.map((step) => step.chunk)),
};

/** What a rank computed; the rest of a step it waited for others. @returns {Lane} */
function laneOf(rank) {
  return { name: `rank ${rank}`, height: 13, kind: "phase", property: "--busy", spans: (s) => [s.start, s.end - (s.waits[rank] ?? 0)] };
}

/** The lanes from top to bottom; ranks where there are several, copies where some are known. @returns {Lane[]} */
export function lanesFor(copies, ranks) {
  const names = [...new Set(copies.map((copy) => copy.lane))].sort();
  const lanes = names.map((lane) => ({ name: `copy ${lane}`, height: 13, kind: "copy", lane, property: "--copy" }));
  return [...HOST, ...DEVICE, ...Array.from({ length: ranks }, (_, rank) => laneOf(rank)), ...lanes, ...BATCH];
}

export function heightOf(lanes) {
  return AXIS + lanes.reduce((sum, lane) => sum + lane.height + GAP, 0);
}

/**
 * Everything that one picture shows.
 * @typedef {{width: number, height: number, from: number, to: number, edge: number, lanes: Lane[],
 *   steps: any[], gaps: any[], copies: any[], chosenStep: number | null, chosenGap: any,
 *   request: {start: number, end: number, steps: Set<number>} | null}} Picture
 */

/** @param {CanvasRenderingContext2D} ctx @param {Picture} picture */
export function draw(ctx, picture) {
  ctx.clearRect(0, 0, picture.width, picture.height);
  ctx.font = `11px ${getComputedStyle(ctx.canvas).fontFamily}`;
  ctx.textBaseline = "middle";
  drawAxis(ctx, picture);
  drawRequest(ctx, picture);
  let top = AXIS;
  for (const lane of picture.lanes) {
    drawLane(ctx, picture, lane, top);
    top += lane.height + GAP;
  }
}

/** The lane at a height of the picture. */
export function laneAt(lanes, y) {
  let top = AXIS;
  for (const lane of lanes) {
    if (y >= top && y < top + lane.height + GAP) return lane;
    top += lane.height + GAP;
  }
  return null;
}

function drawLane(ctx, picture, lane, top) {
  ctx.fillStyle = colour("--muted");
  ctx.textAlign = "right";
  const lines = lane.kind in MOST ? [lane.name, `max ${MOST[lane.kind](picture)}`] : [lane.name];
  const first = top + (lane.height - (lines.length - 1) * LINE) / 2 + 0.5;
  lines.forEach((line, place) => ctx.fillText(line, GUTTER - 8, first + place * LINE));
  ctx.fillStyle = colour("--lane");
  ctx.fillRect(GUTTER, top, picture.width - GUTTER, lane.height);
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, top, picture.width - GUTTER, lane.height);
  ctx.clip();
  if (lane.kind === "compute") drawCompute(ctx, picture, lane, top);
  else if (lane.kind === "copy") drawSpans(ctx, picture, lane, top, copySpans(picture, lane));
  else if (lane.kind === "phase") drawSpans(ctx, picture, lane, top, picture.steps.map(lane.spans));
  else drawLevel(ctx, picture, lane, top);
  drawChosen(ctx, picture, lane, top);
  ctx.restore();
}

function copySpans(picture, lane) {
  return picture.copies.filter((copy) => copy.lane === lane.lane).map((copy) => [copy.start, copy.end]);
}

function drawSpans(ctx, picture, lane, top, spans) {
  const columns = newColumns(picture);
  for (const [start, end] of spans) cover(columns, picture.from, perColumn(picture), start, end);
  ctx.beginPath();
  columns.forEach((share, place) => {
    if (share <= 0) return;
    const height = Math.max(1, Math.min(1, share) * lane.height);
    ctx.rect(GUTTER + place, top + lane.height - height, 1, height);
  });
  ctx.fillStyle = colour(lane.property);
  ctx.fill();
}

/** Busy time stands at the bottom of a column, bubbles hang from the top by cause: one pixel may hold many steps. */
function drawCompute(ctx, picture, lane, top) {
  drawSpans(ctx, picture, { ...lane, property: "--busy" }, top, picture.steps.map(lane.spans));
  const used = newColumns(picture);
  const order = [...CAUSES.map((cause) => cause.key), ...picture.gaps.map((gap) => gap.cause)];
  for (const key of new Set(order)) {
    const gaps = picture.gaps.filter((gap) => gap.cause === key);
    if (!gaps.length) continue;
    const idle = newColumns(picture);
    for (const gap of gaps) cover(idle, picture.from, perColumn(picture), gap.start, gap.end);
    ctx.beginPath();
    idle.forEach((share, place) => {
      if (share <= 0) return;
      const height = Math.max(LEAST_BUBBLE, share * lane.height);
      ctx.rect(GUTTER + place, top + used[place], 1, height);
      used[place] += height;
    });
    ctx.fillStyle = colour(causeProperty(key));
    ctx.fill();
  }
  drawComputeText(ctx, picture, lane, top);
}

function drawComputeText(ctx, picture, lane, top) {
  const middle = top + lane.height / 2 + 0.5;
  ctx.textAlign = "center";
  ctx.fillStyle = colour("--on-busy");
  for (const step of picture.steps) {
    const [left, right] = inside(picture, step.start, step.end - (step.waits[0] ?? 0));
    if (right - left > 46) ctx.fillText(String(step.step), (left + right) / 2, middle);
  }
  ctx.fillStyle = colour("--on-cause");
  for (const gap of picture.gaps) {
    const [left, right] = inside(picture, gap.start, gap.end);
    const { name, mark } = causeOf(gap.cause);
    if (right - left > 110) ctx.fillText(`${name} ${duration(gap.end - gap.start)}`, (left + right) / 2, middle);
    else if (right - left > 11) ctx.fillText(mark, (left + right) / 2, middle);
  }
}

/** What each step held, as a bar over its time on the device; close together, the largest of a pixel shows. */
function drawLevel(ctx, picture, lane, top) {
  const most = MOST[lane.kind](picture);
  const columns = newColumns(picture);
  for (const step of picture.steps) {
    const [left, right] = inside(picture, step.start, step.end);
    const high = Math.min(columns.length - 1, Math.max(Math.floor(left - GUTTER), Math.ceil(right - GUTTER) - 1));
    for (let place = Math.floor(left - GUTTER); place <= high; place += 1) {
      columns[place] = Math.max(columns[place], step[lane.kind]);
    }
  }
  ctx.beginPath();
  columns.forEach((value, place) => {
    const height = value > 0 ? Math.max(1, (value / most) * (lane.height - 1)) : 0;
    if (height) ctx.rect(GUTTER + place, top + lane.height - height, 1, height);
  });
  ctx.fillStyle = colour(lane.property);
  ctx.fill();
}

/** The chosen step in all lanes, or the chosen bubble in compute. */
function drawChosen(ctx, picture, lane, top) {
  ctx.strokeStyle = colour("--ink");
  ctx.lineWidth = 1.5;
  const frame = (start, end) => {
    const left = x(picture, start);
    ctx.strokeRect(left - 0.75, top + 0.75, Math.max(3, x(picture, end) - left + 1.5), lane.height - 1.5);
  };
  if (picture.chosenGap && lane.kind === "compute") frame(picture.chosenGap.start, picture.chosenGap.end);
  for (const step of picture.steps) {
    const ofRequest = lane.kind === "chunk" && picture.request?.steps.has(step.step);
    if (ofRequest) frame(step.start, step.end);
    else if (step.step === picture.chosenStep && lane.spans) frame(...lane.spans(step));
  }
}

function drawRequest(ctx, picture) {
  if (!picture.request) return;
  const [left, right] = inside(picture, picture.request.start, picture.request.end);
  if (right <= left) return;
  ctx.fillStyle = colour("--band");
  ctx.fillRect(left, 0, right - left, picture.height);
  ctx.fillStyle = colour("--accent");
  ctx.fillRect(left, AXIS - 3, right - left, 2);
}

/** Moments before now, at the same places in each picture: the eye rests, the data moves. */
function drawAxis(ctx, picture) {
  const span = picture.to - picture.from;
  const step = niceStep(span / Math.max(2, (picture.width - GUTTER) / 130));
  const held = picture.edge - picture.to;
  ctx.textAlign = "center";
  for (let back = Math.ceil(held / step) * step; back <= held + span; back += step) {
    const at = x(picture, picture.edge - back);
    ctx.fillStyle = colour("--line");
    ctx.fillRect(Math.round(at), AXIS - 2, 1, picture.height);
    ctx.fillStyle = colour("--muted");
    const text = back < step / 2 ? "now" : `−${axisText(back, step)}`;
    const half = ctx.measureText(text).width / 2;
    ctx.fillText(text, Math.min(picture.width - half, Math.max(GUTTER + half, at)), 7);
  }
}

function axisText(ms, step) {
  if (step >= 100) return `${(ms / 1000).toFixed(step >= 1000 ? 0 : 1)} s`;
  return `${ms.toFixed(Math.max(0, -Math.floor(Math.log10(step))))} ms`;
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  const times = [1, 2, 5, 10].find((factor) => factor * power >= least) ?? 10;
  return times * power;
}

function newColumns(picture) {
  return new Float64Array(Math.max(1, Math.floor(picture.width - GUTTER)));
}

function perColumn(picture) {
  return (picture.to - picture.from) / (picture.width - GUTTER);
}

function x(picture, time) {
  return GUTTER + (time - picture.from) / perColumn(picture);
}

function inside(picture, start, end) {
  return [Math.max(GUTTER, x(picture, start)), Math.min(picture.width, x(picture, end))];
}
