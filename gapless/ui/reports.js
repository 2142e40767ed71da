/** The viewer of A/B reports: reads a file of `gapless ab`; the picture is made by the report's own renderer. */

import { el, setText } from "./dom.js";
import { renderReport } from "./report.js";

const MOST_BYTES = 64 * 2 ** 20;

export class ReportViewer {
  /** @param {{picker: HTMLInputElement, zone: HTMLElement, status: HTMLElement, view: HTMLElement}} parts */
  constructor(parts) {
    this.parts = parts;
    this.shown = 0;
    parts.picker.addEventListener("change", () => this.#take(parts.picker.files));
    parts.zone.addEventListener("dragover", (event) => this.#hover(event, true));
    parts.zone.addEventListener("dragleave", (event) => this.#hover(event, false));
    parts.zone.addEventListener("drop", (event) => {
      this.#hover(event, false);
      this.#take(event.dataTransfer?.files ?? null);
    });
  }

  #hover(event, over) {
    event.preventDefault();
    this.parts.zone.classList.toggle("over", over);
  }

  async #take(files) {
    const file = files?.[0];
    if (!file) return;
    try {
      if (file.size > MOST_BYTES) throw new Error("it is larger than 64 MB");
      this.#render(file.name, JSON.parse(await file.text()));
    } catch (error) {
      this.parts.view.replaceChildren();
      setText(this.parts.status, `${file.name} is not a report of gapless ab: ${error.message}`);
    }
  }

  #render(name, report) {
    const page = el("div", { class: "report" });
    this.parts.view.replaceChildren(page); // charts are as wide as their place
    renderReport(page, report);
    setText(this.parts.status, `${name} is shown below`);
    this.shown += 1;
  }
}
