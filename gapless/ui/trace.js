/** Saving the last seconds as a trace file, for Perfetto and similar viewers. */

import { call } from "./api.js";
import { download } from "./dom.js";

const LEAST = 10;
const MOST = 60;

/** Save at least this many seconds; returns the file's name. A plain link could not send the API key. */
export async function saveTrace(seconds) {
  const whole = Math.min(MOST, Math.max(LEAST, Math.ceil(seconds)));
  const response = await call(`debug/trace?seconds=${whole}`);
  const name = nameOf(response.headers.get("content-disposition"));
  download(name, await response.blob());
  return name;
}

function nameOf(disposition) {
  return /filename="?([\w.-]+)"?/.exec(disposition ?? "")?.[1] ?? "gapless-trace.json";
}
