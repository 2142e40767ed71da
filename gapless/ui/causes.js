/** Why the device was idle: the causes of base/records.py, most telling first. `name` and `mark` stand beside every colour, which alone says nothing. */

/** @typedef {{key: string, name: string, mark: string, help: string, mend: string}} Cause */

/** @type {Cause[]} */
export const CAUSES = [
  { key: "host_late", name: "host late", mark: "H", help: "the host had not launched the next step in time", mend: "give the host a core: lower --threads, move other work off this machine, or raise --depth" },
  { key: "depth", name: "depth", mark: "D", help: "the limit of steps in flight kept the host from launching", mend: "raise --depth, or leave it at auto" },
  { key: "launch", name: "launch", mark: "L", help: "the step was enqueued, and the device had not begun it", mend: "on a CPU the device's thread waits for a core: lower --threads, or free one; on a GPU steps are short, so batch more requests" },
  { key: "graph_miss", name: "graph miss", mark: "M", help: "a program of the step had no graph and ran eagerly", mend: "raise --max-cudagraph-capture-size to the rows that run" },
  { key: "capture", name: "capture", mark: "P", help: "the host captured a graph, and the device had to come to rest for it", mend: "none: it ends once the shapes of your load have graphs; an engine at rest captures without making anybody wait" },
  { key: "grammar", name: "grammar", mark: "G", help: "a step gave no row a token, since the masks of all were late", mend: "use simpler schemas, expressions or functions, and free a core for the threads that write masks" },
  { key: "copy_wait", name: "copy wait", mark: "C", help: "the tokens of the step before, or pages of a KV tier, were still on their way", mend: "raise --depth; if KV tiers load much, use a faster or a larger one" },
  { key: "ranks", name: "ranks", mark: "R", help: "a step waited for the other ranks", mend: "the rank whose lane has no gaps keeps the others waiting: free a core for it, or its device of other work" },
  { key: "no_work", name: "no work", mark: "–", help: "there was nothing to run: idle, but not a bubble", mend: "send more requests at a time" },
];

const BY_KEY = new Map(CAUSES.map((cause) => [cause.key, cause]));

/** The cause with this key; one that the page does not know keeps its own name. @returns {Cause} */
export function causeOf(key) {
  return BY_KEY.get(key) ?? { key, name: String(key).replaceAll("_", " "), mark: "?", help: "", mend: "" };
}

/** Causes of idle time inside of a step; other idle time is before one. */
export const WITHIN = ["grammar", "ranks"];

/** Idle with nothing to do is not a bubble. */
export function isBubble(key) {
  return key !== "no_work";
}
