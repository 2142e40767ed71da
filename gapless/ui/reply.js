/** One answer in the chat's log: thinking (folded), text, tool calls, and what it cost. */

import { el, setText } from "./dom.js";
import { showMarkdown } from "./markdown.js";

export class Reply {
  constructor() {
    this.reasoning = "";
    this.said = "";
    /** @type {{id: string, type: string, function: {name: string, arguments: string}}[]} */
    this.calls = [];
    this.thought = el("div", { class: "markdown" });
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", { text: "Thinking" }), this.thought);
    this.text = el("div", { class: "text markdown" });
    this.called = el("div", { class: "calls" });
    this.cost = el("div", { class: "cost" });
    this.element = el("div", { class: "message assistant" }, this.thinking, this.text, this.called, this.cost);
    this.asked = 0;
  }

  /** An answer that was kept. @param {import("./conversations.js").Message} message */
  static of(message) {
    const reply = new Reply();
    reply.said = message.content;
    reply.reasoning = message.reasoning ?? "";
    reply.calls = message.tool_calls ?? [];
    setText(reply.cost, message.cost ?? "");
    reply.show();
    return reply;
  }

  /** Take a chunk's choice; return the characters that came with it. */
  add(choice) {
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning ?? "";
    const text = delta.content ?? "";
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
    showMarkdown(this.thought, this.reasoning);
    showMarkdown(this.text, this.said);
    while (this.called.childElementCount < this.calls.length) this.called.append(el("code", { class: "call" }));
    this.calls.forEach((call, i) => setText(this.called.children[i], `${call.function.name}(${call.function.arguments})`));
  }

  /** The message to keep; null when nothing was said. @returns {import("./conversations.js").Message | null} */
  message() {
    if (!this.said && !this.calls.length) return null;
    return {
      role: "assistant", content: this.said, cost: this.cost.textContent,
      ...(this.calls.length ? { tool_calls: this.calls } : {}), ...(this.reasoning ? { reasoning: this.reasoning } : {}),
    };
  }
}
