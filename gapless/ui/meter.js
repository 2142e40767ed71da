/** Time to the first token and tokens per second, as this page sees them. */

import { count, duration, rate } from "./format.js";

export class Meter {
  constructor(sent) {
    this.sent = sent;
    this.first = NaN;
    this.last = NaN;
    this.pieces = 0;
    this.usage = null;
  }

  add(piece, usage, now) {
    if (usage) this.usage = usage;
    if (!piece) return;
    if (Number.isNaN(this.first)) this.first = now;
    this.last = now;
    this.pieces += 1;
  }

  /** Nothing before the first token. Chunks are counted until the server has sent the number of their tokens. */
  text(stopped) {
    if (!this.pieces) return stopped ? "stopped" : "";
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const seconds = (this.last - this.first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : NaN;
    const parts = [`TTFT ${duration(this.first - this.sent)}`, `${rate(speed)} tokens/s`, `${count(tokens)} tokens`];
    if (this.usage) parts.push(`prompt ${count(this.usage.prompt_tokens)}`);
    if (stopped) parts.push("stopped");
    return parts.join(" · ");
  }
}
