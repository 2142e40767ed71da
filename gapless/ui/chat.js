/** The chat: conversations with the served model, and what each answer cost. */

import { call, getJson, keyEvents } from "./api.js";
import { conversations, forget, keep, newConversation, titleOf } from "./conversations.js";
import { byId, download, el, setText } from "./dom.js";
import { askForKeys } from "./key.js";
import { Meter } from "./meter.js";
import { Reply } from "./reply.js";
import { serverEvents } from "./sse.js";
import { themeButton } from "./theme.js";

const SETTINGS = "gapless-settings";
const KEPT = ["model", "system", "temperature", "tokens", "schema", "tools"];
const NAMES = ["form", "input", "log", "send", "stop", "again", "new", "export", "delete", "list", ...KEPT];
/** Nearer to its end than this, the log follows what is said. */
const AT_END = 60;

class Chat {
  constructor() {
    this.parts = Object.fromEntries(NAMES.map((name) => [name, byId(`chat-${name}`)]));
    this.conversation = newConversation();
    /** @type {AbortController | null} */
    this.running = null;
    this.answers = 0;
    this.#listen();
    this.#restore();
    this.#open(this.conversation);
  }

  async setModels() {
    const { data } = await getJson("v1/models");
    const { model } = this.parts;
    const chosen = model.value || this.wanted;
    model.replaceChildren(...data.map(({ id }) => el("option", { value: id, text: id, selected: id === chosen })));
  }

  #listen() {
    const { parts } = this;
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
    parts.again.addEventListener("click", () => this.#regenerate());
    parts.new.addEventListener("click", () => this.#open(newConversation()));
    parts.delete.addEventListener("click", () => this.#delete());
    parts.export.addEventListener("click", () => this.#export());
    parts.form.addEventListener("change", () => this.#keepSettings());
  }

  #restore() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    } catch { /* the defaults do */ }
    this.wanted = kept.model;
    for (const name of KEPT) if (name !== "model" && typeof kept[name] === "string") this.parts[name].value = kept[name];
  }

  #keepSettings() {
    localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(KEPT.map((name) => [name, this.parts[name].value]))));
  }

  /** Show a conversation. */
  #open(conversation) {
    this.running?.abort();
    this.conversation = conversation;
    this.parts.log.replaceChildren(...conversation.messages.map((message) => (message.role === "user" ? said(message.content) : Reply.of(message).element)));
    this.parts.log.scrollTop = this.parts.log.scrollHeight;
    this.#list();
    this.parts.input.focus();
  }

  #list() {
    const { messages, id } = this.conversation;
    this.parts.list.replaceChildren(...conversations().map((one) => {
      const current = one.id === id ? "true" : null;
      return el("li", {}, el("button", { type: "button", "aria-current": current, text: titleOf(one), onclick: () => this.#open(one) }));
    }));
    const free = !this.running && messages.length > 0;
    for (const name of ["export", "delete", "again"]) this.parts[name].disabled = !free;
  }

  #delete() {
    if (!confirm(`Delete the conversation "${titleOf(this.conversation)}"?`)) return;
    forget(this.conversation);
    this.#open(newConversation());
  }

  #export() {
    const text = JSON.stringify({ ...this.conversation, system: this.parts.system.value }, null, 1);
    download(`gapless-chat-${new Date(this.conversation.at).toISOString().slice(0, 10)}.json`, new Blob([text], { type: "application/json" }));
  }

  async send() {
    const text = this.parts.input.value.trim();
    if (!text || this.running) return;
    this.parts.input.value = "";
    const { messages } = this.conversation;
    if (messages[messages.length - 1]?.role === "user") messages.pop(); // it got no answer
    messages.push({ role: "user", content: text });
    this.parts.log.append(said(text));
    await this.#answer();
  }

  /** Another answer in the place of the last one. */
  async #regenerate() {
    const { messages } = this.conversation;
    if (this.running || !messages.length) return;
    if (messages[messages.length - 1].role === "assistant") messages.pop();
    const last = this.parts.log.lastElementChild;
    if (last?.classList.contains("assistant")) last.remove();
    await this.#answer();
  }

  async #answer() {
    const { conversation } = this;
    const reply = new Reply();
    const running = new AbortController();
    this.parts.log.append(reply.element);
    this.running = running;
    this.#busy(true);
    try {
      await this.#stream(conversation, reply, running.signal);
      this.answers += 1;
    } catch (error) {
      if (!running.signal.aborted) reply.element.append(el("p", { class: "error", role: "alert", text: error.message }));
    } finally {
      if (this.running === running) this.running = null;
      this.#busy(false);
    }
  }

  #busy(busy) {
    this.parts.send.disabled = busy;
    this.parts.stop.disabled = !busy;
    this.parts.log.setAttribute("aria-busy", String(busy));
    this.#list();
  }

  async #stream(conversation, reply, signal) {
    const meter = new Meter(performance.now());
    const draw = drawing(() => this.#say(reply, meter));
    try {
      const response = await call("v1/chat/completions", { json: this.#body(conversation.messages), signal });
      for await (const data of serverEvents(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        meter.add(reply.add(chunk.choices[0]), chunk.usage, performance.now());
        draw();
      }
    } finally {
      // What was said until then stays part of the conversation, also when it was stopped.
      draw.stop();
      this.#say(reply, meter, signal.aborted);
      const message = reply.message();
      if (message) conversation.messages.push(message);
      keep(conversation);
    }
  }

  #say(reply, meter, stopped = false) {
    const { log } = this.parts;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < AT_END;
    reply.show();
    setText(reply.cost, meter.text(stopped));
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  /** What is asked beside the messages: a form of the answer, and tools. */
  #asked() {
    const schema = parsed(this.parts.schema, "the schema");
    const format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return { tools: parsed(this.parts.tools, "the list of tools"), response_format: schema && format };
  }

  #body(messages) {
    const { model, temperature, tokens, system } = this.parts;
    const told = messages.map(({ role, content, tool_calls }) => ({ role, content, ...(tool_calls ? { tool_calls } : {}) }));
    if (system.value.trim()) told.unshift({ role: "system", content: system.value });
    return {
      model: model.value, messages: told, ...this.#asked(), stream: true, stream_options: { include_usage: true },
      temperature: temperature.valueAsNumber || 0, max_tokens: tokens.valueAsNumber || 512,
    };
  }
}

function said(text) {
  return el("div", { class: "message user", text });
}

/** Draw once a picture, however many tokens come. */
function drawing(draw) {
  let asked = 0;
  const ask = () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  };
  ask.stop = () => cancelAnimationFrame(asked);
  return ask;
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

const chat = new Chat();
const models = () => chat.setModels().catch((error) => console.debug("no models:", error.message));
keyEvents.addEventListener("changed", models);
askForKeys(byId("key-dialog"), byId("key-form"), byId("key-input"));
themeButton(byId("theme"));
models();
/** For tests and the curious. */
Object.assign(window, { gapless: { counters: { get answers() { return chat.answers; } } } });
