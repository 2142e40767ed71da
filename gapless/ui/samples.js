/** The server's samples, one a second, column by column; they begin before the page was opened. */

/** As many as the server keeps, and as many again for a view that is held. */
const KEPT = 3600;

export class Samples {
  next = 0;
  /** @type {Record<string, (number | null)[]>} */
  columns = {};
  /** Quantiles of the last minute, in seconds. @type {Record<string, {p50: number | null, p99: number | null, many: number}>} */
  latency = {};
  memory = {};

  get length() {
    return this.columns.time?.length ?? 0;
  }

  /** @param {any} answer of /debug/history */
  add(answer) {
    // The server began again, or samples were missed: what it has now is all that there is.
    const keeps = answer.first === this.next && this.length > 0;
    if (!keeps) this.columns = Object.fromEntries(answer.columns.map((name) => [name, []]));
    answer.columns.forEach((name, place) => {
      const column = this.columns[name];
      for (const sample of answer.samples) column.push(sample[place]);
      if (column.length > KEPT) column.splice(0, column.length - KEPT);
    });
    this.next = answer.next;
    this.latency = answer.latency;
    this.memory = answer.memory;
  }

  /** The newest values of a column. */
  last(name, many) {
    return (this.columns[name] ?? []).slice(-many);
  }

  /** Their mean, of those that are known; NaN where none is. */
  mean(name, many) {
    const values = this.last(name, many).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN;
  }
}
