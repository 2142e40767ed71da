/** The server's settings: first what differs from the defaults, the rest on demand. */

import { el } from "./dom.js";
import { duration } from "./format.js";

export class Settings {
  /** @param {{changed: HTMLElement, all: HTMLElement, none: HTMLElement}} parts */
  constructor(parts) {
    this.parts = parts;
  }

  /** @param {any} report the answer of /server_info */
  show(report) {
    const { changed, all, none } = this.parts;
    const names = Object.keys(report.changed);
    changed.replaceChildren(...names.map((name) => row(name, report.changed[name], false)));
    /** @type {HTMLElement} */ (changed.closest("table")).hidden = names.length === 0;
    none.hidden = names.length > 0;
    const groups = [["Engine", report.engine], ["Server", report.server], ["Resolved", report.info]];
    all.replaceChildren(...groups.flatMap(([title, fields]) => group(title, fields ?? {}, report.changed)));
  }
}

function group(title, fields, changed) {
  const head = el("tr", {}, el("th", { colspan: 2, scope: "rowgroup", text: title }));
  return [head, ...Object.entries(fields).map(([name, value]) => row(name, value, name in changed))];
}

function row(name, value, differs) {
  const head = el("th", { scope: "row", text: name });
  return el("tr", { class: differs ? "differs" : null }, head, el("td", { text: words(name, value) }));
}

function words(name, value) {
  if (name === "startup_seconds") {
    return value.map(([what, seconds]) => `${what} ${duration(seconds * 1000)}`).join(", ");
  }
  if (value === null || value === "") return "–";
  if (Array.isArray(value)) return value.length ? value.join(", ") : "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
