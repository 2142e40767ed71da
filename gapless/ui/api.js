/** Requests to the server that sent this page, and the API key that it may ask for. */

const KEY = "gapless-api-key";
/** The server's own root: the folder above this file, so that a proxy may serve the whole under a prefix. */
const ROOT = new URL("..", import.meta.url);

/** The server's refusal, in its own words. */
export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Tells "needed" when the server wants a key (or another one), "changed" when one was given. */
export const keyEvents = new EventTarget();

/** Kept for this tab only, and sent to this server only. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
  keyEvents.dispatchEvent(new Event("changed"));
}

/**
 * A response with a good status; throws HttpError otherwise. `path` is relative to the server's root.
 * @param {string} path
 * @param {{json?: unknown, signal?: AbortSignal}} [options]
 */
export async function call(path, { json, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (json !== undefined) headers["content-type"] = "application/json";
  const body = json === undefined ? undefined : JSON.stringify(json);
  const url = new URL(path, ROOT);
  const engine = new URLSearchParams(location.search).get("engine");
  if (engine && path.startsWith("debug/")) url.searchParams.set("engine", engine);
  const response = await fetch(url, { method: body ? "POST" : "GET", headers, body, signal, cache: "no-store" });
  if (response.ok) return response;
  if (response.status === 401) keyEvents.dispatchEvent(new Event("needed"));
  throw new HttpError(response.status, await reason(response));
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 200) || `status ${response.status}`;
  }
}
