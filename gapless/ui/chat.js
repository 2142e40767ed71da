/** The chat box: a conversation with the served model, and what each answer cost. */

import { call } from "./api.js";
import { el, setText } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { Reply } from "./reply.js";
import { serverEvents } from "./sse.js";

export class Chat {
  /** @param {Record<string, any>} parts the elements of the form, by name */
  constructor(parts) {
    this.parts = parts;
    /** @type {Record<string, any>[]} */
    this.messages = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.answers = 0;
    parts.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    parts.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    parts.stop.addEventListener("click", () => this.running?.abort());
    parts.clear.addEventListener("click", () => this.clear());
  }

  /** @param {string[]} names */
  setModels(names) {
    const { model } = this.parts;
    const shown = Array.from(model.options, (option) => option.value);
    if (shown.join("\n") === names.join("\n")) return; // what was chosen stays chosen
    model.replaceChildren(...names.map((name) => el("option", { value: name, text: name })));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.parts.log.replaceChildren();
    this.parts.input.focus();
  }

  async send() {
    const { input, log } = this.parts;
    const text = input.value.trim();
    if (!text || this.running) return;
    input.value = "";
    log.append(el("div", { class: "message user", text }));
    const reply = new Reply();
    log.append(reply.element);
    this.running = new AbortController();
    this.#busy(true);
    try {
      await this.#stream(text, reply, this.running.signal);
    } catch (error) {
      if (!this.running.signal.aborted) reply.text.append(el("p", { class: "error", role: "alert", text: error.message }));
    } finally {
      this.running = null;
      this.#busy(false);
    }
  }

  #busy(busy) {
    this.parts.send.disabled = busy;
    this.parts.stop.disabled = !busy;
    this.parts.log.setAttribute("aria-busy", String(busy));
  }

  async #stream(text, reply, signal) {
    const chatting = this.parts.mode.value === "chat";
    const body = this.#body(text, chatting);
    if (chatting) this.messages.push({ role: "user", content: text });
    const meter = new Meter(performance.now());
    try {
      const path = chatting ? "v1/chat/completions" : "v1/completions";
      const response = await call(path, { json: body, signal });
      for await (const data of serverEvents(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const piece = reply.add(chunk.choices[0]);
        meter.add(piece, chunk.usage, performance.now());
        this.#say(reply, meter);
      }
      this.answers += 1;
    } finally {
      // What was said until then stays part of the conversation, also when it was stopped.
      const message = reply.message();
      if (chatting && message) this.messages.push(message);
      else if (chatting) this.messages.pop();
      setText(reply.cost, meter.text(signal.aborted));
    }
  }

  #say(reply, meter) {
    const { log } = this.parts;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    reply.show();
    setText(reply.cost, meter.text(false));
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  /** What the chat asks beside its messages: a form of the answer, and tools. */
  #asked() {
    const schema = parsed(this.parts.schema, "the schema");
    const format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return { tools: parsed(this.parts.tools, "the list of tools"), response_format: schema && format };
  }

  #body(text, chatting) {
    const { model, temperature, tokens } = this.parts;
    const messages = [...this.messages, { role: "user", content: text }];
    const input = chatting ? { messages, ...this.#asked() } : { prompt: text };
    return {
      model: model.value, ...input, stream: true, stream_options: { include_usage: true },
      temperature: temperature.valueAsNumber || 0, max_tokens: tokens.valueAsNumber || 256,
    };
  }
}

/** The JSON in a field, or undefined where it is empty. */
function parsed(field, what) {
  if (!field.value.trim()) return undefined;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

/** Time to the first token and tokens per second, as this page saw them. */
class Meter {
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
