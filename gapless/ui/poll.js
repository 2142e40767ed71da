/** Asking again and again, one question at a time, only while it is switched on. */

export class Poll {
  /** @param {() => Promise<void>} ask  @param {number} pause ms between an answer and the next question */
  constructor(ask, pause) {
    this.ask = ask;
    this.pause = pause;
    this.turn = 0;
  }

  start() {
    if (!this.timer) this.#again(++this.turn, 0);
  }

  stop() {
    this.turn += 1; // an answer still on its way starts no further question
    clearTimeout(this.timer);
    this.timer = 0;
  }

  timer = 0;

  #again(turn, after) {
    this.timer = setTimeout(async () => {
      // The feed and the health poll tell what is wrong; a missed answer here is asked for again.
      await this.ask().catch((error) => console.debug("asked in vain:", error.message));
      if (turn === this.turn) this.#again(turn, this.pause);
    }, after);
  }
}
