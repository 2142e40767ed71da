/** Numbers for people. Times are milliseconds. */

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Keeps a number and its unit on one line. */
const SPACE = "\u00a0";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Three significant digits and a unit: 87.0 µs, 3.12 ms, 1.40 s. */
export function duration(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms === 0) return `0${SPACE}µs`;
  const size = Math.abs(ms);
  if (size < 1) return `${digits(ms * 1000)}${SPACE}µs`;
  return size < 1000 ? `${digits(ms)}${SPACE}ms` : `${digits(ms / 1000)}${SPACE}s`;
}

export function count(value) {
  return Number.isFinite(value) ? GROUPED.format(value) : "–";
}

/** Three significant digits and a unit: 1.50 KiB, 12.0 GiB. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const power = Math.min(UNITS.length - 1, value < 1 ? 0 : Math.floor(Math.log2(value) / 10));
  return `${power ? digits(value / 1024 ** power) : count(value)}${SPACE}${UNITS[power]}`;
}

/** A share of 0..1. Small shares keep two places: 0.04 % is not nothing. */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value.toFixed(value === 0 || value >= 9.95 ? 0 : value >= 0.995 ? 1 : 2)}${SPACE}%`;
}

/** A number of a rate: 1,234 or 97.3 or 0.42. */
export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 99.95 ? count(value) : value.toFixed(value >= 9.995 || value === 0 ? 1 : 2);
}

export function median(values) {
  if (!values.length) return NaN;
  const sorted = Float64Array.from(values).sort();
  return sorted[sorted.length >> 1];
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}
