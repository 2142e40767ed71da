/** The stream of step records: opened while the page is in sight, closed otherwise, so that the engine then pays nothing. */

import { HttpError, call } from "./api.js";
import { serverEvents } from "./sse.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;
/** The server sends at least one event a second. */
const SILENCE = 5000;

/** @typedef {"off" | "connecting" | "live" | "lost" | "key"} FeedState */

export class Feed {
  /** @type {AbortController | null} */
  #running = null;

  /** @param {{onEvent: (event: any) => void, onState: (state: FeedState, why: string) => void}} listener */
  constructor(listener) {
    this.listener = listener;
    this.connections = 0;
  }

  start() {
    if (this.#running) return;
    this.#running = new AbortController();
    this.#run(this.#running.signal);
  }

  stop() {
    this.#running?.abort();
    this.#running = null;
    this.listener.onState("off", "");
  }

  async #run(stopped) {
    let pause = FIRST_PAUSE;
    while (!stopped.aborted) {
      this.listener.onState("connecting", "");
      let why = "the stream ended";
      try {
        await this.#read(stopped, () => (pause = FIRST_PAUSE));
      } catch (error) {
        if (stopped.aborted) return;
        if (error instanceof HttpError && error.status === 401) return this.#needsKey();
        why = error.message;
      }
      if (stopped.aborted) return;
      this.listener.onState("lost", why);
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(LONGEST_PAUSE, pause * 2);
    }
  }

  #needsKey() {
    this.#running = null; // app.js starts it again when there is a key
    this.listener.onState("key", "");
  }

  async #read(stopped, onFirst) {
    const connection = new AbortController();
    const hangUp = () => connection.abort(new Error("nothing was heard for 5 s"));
    stopped.addEventListener("abort", hangUp);
    let silence = setTimeout(hangUp, SILENCE);
    try {
      const response = await call("debug/steps", { signal: connection.signal });
      this.connections += 1;
      this.listener.onState("live", "");
      for await (const data of serverEvents(response)) {
        clearTimeout(silence);
        silence = setTimeout(hangUp, SILENCE);
        onFirst();
        this.listener.onEvent(JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
      stopped.removeEventListener("abort", hangUp);
    }
  }
}
