/** Why the device was idle: the causes of base/records.py, most telling first. `name` and `mark` stand beside every colour, which alone says nothing. */

/** @typedef {{key: string, name: string, mark: string, help: string}} Cause */

/** @type {Cause[]} */
export const CAUSES = [
  { key: "host_late", name: "host late", mark: "H", help: "the host had not launched the next step in time" },
  { key: "depth", name: "depth", mark: "D", help: "the limit of steps in flight kept the host from launching" },
  { key: "launch", name: "launch", mark: "L", help: "the step was enqueued, and the device had not begun it yet" },
  { key: "graph_miss", name: "graph miss", mark: "M", help: "the step's shape was not captured and ran eagerly" },
  { key: "grammar", name: "grammar", mark: "G", help: "sampling waited for a grammar mask" },
  { key: "copy_wait", name: "copy wait", mark: "C", help: "the tokens of the step before, or pages of a KV tier, were still on their way" },
  { key: "no_work", name: "no work", mark: "–", help: "nothing could be run: idle, but not a bubble" },
];

const BY_KEY = new Map(CAUSES.map((cause) => [cause.key, cause]));

/** The cause with this key; one that the page does not know keeps its own name. @returns {Cause} */
export function causeOf(key) {
  return BY_KEY.get(key) ?? { key, name: String(key).replaceAll("_", " "), mark: "?", help: "" };
}

/** Idle with nothing to do is not a bubble. */
export function isBubble(key) {
  return key !== "no_work";
}
