/**
 * How much of each pixel column intervals cover, 0..1. Far out this is a density, close up it is the interval itself:
 * one rule for every zoom, and nothing is lost between pixels.
 * @param {Float64Array} columns added to
 * @param {number} from time of the left edge
 * @param {number} perColumn time of one column
 */
export function cover(columns, from, perColumn, start, end) {
  const first = (start - from) / perColumn;
  const last = (end - from) / perColumn;
  const low = Math.max(0, Math.floor(first));
  const high = Math.min(columns.length - 1, Math.ceil(last) - 1);
  for (let place = low; place <= high; place += 1) {
    columns[place] += Math.max(0, Math.min(last, place + 1) - Math.max(first, place));
  }
}
