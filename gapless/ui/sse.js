/** Server-sent events out of a fetch: EventSource can neither send a key nor a body. */

/**
 * The data of each event, in order; comments are skipped.
 * @param {Response} response
 */
export async function* serverEvents(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event without its empty line was cut off, and is none
      const lines = (rest + value).replaceAll("\r\n", "\n");
      const blocks = lines.split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const data = dataOf(block);
        if (data !== null) yield data;
      }
    }
  } finally {
    // A caller that leaves early hangs up, so that the server stops sending.
    await reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n") : null;
}
