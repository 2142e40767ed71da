/** One answer in the chat's log: thinking (collapsed), text, and tool calls. */

import { el, setText } from "./dom.js";

export class Reply {
  constructor() {
    this.reasoning = "";
    this.said = "";
    /** @type {{id: string, type: string, function: {name: string, arguments: string}}[]} */
    this.calls = [];
    this.thought = el("div");
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", { text: "Thinking" }), this.thought);
    this.text = el("div", { class: "text" });
    this.called = el("div", { class: "calls" });
    this.cost = el("div", { class: "cost" });
    this.element = el("div", { class: "message assistant" }, this.thinking, this.text, this.called, this.cost);
  }

  /** Take a chunk's choice, of either endpoint; return the characters that came with it. */
  add(choice) {
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning ?? "";
    const text = delta.content ?? choice?.text ?? "";
    this.reasoning += thought;
    this.said += text;
    return thought + text + (delta.tool_calls ?? []).map((piece) => this.#call(piece)).join("");
  }

  #call({ index, id, function: { name, arguments: text = "" } }) {
    const call = (this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } });
    call.function.arguments += text;
    return (name ?? "") + text;
  }

  show() {
    this.thinking.hidden = !this.reasoning;
    setText(this.thought, this.reasoning);
    setText(this.text, this.said);
    while (this.called.childElementCount < this.calls.length) this.called.append(el("code", { class: "call" }));
    this.calls.forEach((call, i) => setText(this.called.children[i], `${call.function.name}(${call.function.arguments})`));
  }

  /** The message as it goes back to the model; null when nothing was said. */
  message() {
    if (!this.said && !this.calls.length) return null;
    return { role: "assistant", content: this.said, ...(this.calls.length ? { tool_calls: this.calls } : {}) };
  }
}
