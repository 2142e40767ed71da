/** Markdown of models as elements. Text becomes text nodes only; what is no Markdown that is known here stays as it is. */

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?\S?)\*\*|(?<![\w*])\*(?=[^\s*])(.+?)(?<!\s)\*(?!\w)|(?<!\w)_(?=\S)(.+?)(?<!\s)_(?!\w)|\[([^\]]+)\]\((https?:[^\s)]+)\)/s;
/** Deeper nesting is text: a reply must not take the page's stack. */
const DEEPEST = 12;

/** @typedef {{source: string, build: () => Node}} Block */

/**
 * Show a text that grows: blocks that are as before stay, with what is selected in them.
 * @param {HTMLElement & {blocks?: string[]}} root
 */
export function showMarkdown(root, text) {
  const blocks = blocksOf(text.split("\n"), 0);
  const before = root.blocks ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === before[same]) same += 1;
  while (root.childNodes.length > same) root.lastChild?.remove();
  root.append(...blocks.slice(same).map((block) => block.build()));
  root.blocks = blocks.map((block) => block.source);
}

/** @returns {Block[]} */
function blocksOf(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, build] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), build });
    at = end;
  }
  return blocks;
}

/** The end of the block that begins at a line, and what makes it. @returns {[number, () => Node]} */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [at + 1, () => el(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2].trim().replace(/(^| )#+$/, "").trim()))];
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (line.includes("|") && SEPARATOR.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at);
  if (depth < DEEPEST && /^ {0,3}>/.test(line)) {
    const end = endOf(lines, at, (next) => /^ {0,3}>/.test(next));
    const inner = lines.slice(at, end).map((quoted) => quoted.replace(/^ {0,3}> ?/, ""));
    return [end, () => el("blockquote", {}, ...nodes(inner, depth + 1))];
  }
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  const end = endOf(lines, at + 1, (next) => next.trim() && !FENCE.test(next) && !HEADING.test(next) && !ITEM.test(next) && !/^ {0,3}>/.test(next));
  return [end, () => el("p", {}, ...inline(lines.slice(at, end).join("\n").trim()))];
}

function endOf(lines, at, goesOn) {
  let end = at;
  while (end < lines.length && goesOn(lines[end])) end += 1;
  return end;
}

function nodes(lines, depth) {
  return blocksOf(lines, depth).map((block) => block.build());
}

/** @returns {[number, () => Node]} a block whose end has not come is code to the end */
function code(lines, at, [, mark, language]) {
  const closed = lines.findIndex((line, place) => place > at && line.trim().startsWith(mark) && !line.trim().slice(mark.length).replaceAll(mark[0], ""));
  const end = closed < 0 ? lines.length : closed;
  const text = lines.slice(at + 1, end).join("\n");
  return [Math.min(lines.length, end + 1), () => codeBlock(text, language)];
}

function codeBlock(text, language) {
  const shown = el("code", { text });
  const copy = el("button", { type: "button", class: "small", text: "Copy", "aria-label": `Copy code${language ? ` (${language})` : ""}` });
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(text, shown)) ? "Copied" : "Selected";
  });
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", { text: language || "code" }), copy), el("pre", { tabindex: 0 }, shown));
}

/** Pages without TLS have no clipboard: the text is selected there, for the keyboard. */
async function copied(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(element);
    return false;
  }
}

/** @returns {[number, () => Node]} */
function table(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|") && line.trim());
  const right = cells(lines[at + 1]).map((cell) => cell.endsWith(":") && !cell.startsWith(":"));
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell, place) => el(tag, { class: right[place] ? "num" : null }, ...inline(cell))));
  const build = () => el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")))));
  return [end, build];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @returns {[number, () => Node]} items of one kind, with what is indented below them */
function list(lines, at, depth) {
  const [, indent, mark] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
  const ordered = /\d/.test(mark);
  /** @type {string[][]} */
  const items = [];
  const end = endOf(lines, at, (line) => {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) {
      if (item[1].length < indent.length || /\d/.test(item[2]) !== ordered || RULE.test(line)) return false;
      items.push([item[3]]);
      return true;
    }
    const last = items[items.length - 1];
    const inside = /^\s+\S/.test(line) || (!line.trim() && last[last.length - 1].trim());
    if (inside) last.push(line.replace(new RegExp(`^\\s{0,${indent.length + mark.length + 1}}`), ""));
    return Boolean(inside);
  });
  const build = () => el(ordered ? "ol" : "ul", { start: ordered && parseInt(mark, 10) !== 1 ? parseInt(mark, 10) : null }, ...items.map((item) => el("li", {}, ...tight(item, depth + 1))));
  return [end, build];
}

/** An item of one paragraph is that paragraph's text. */
function tight(item, depth) {
  const made = nodes(item, depth);
  const [first, ...rest] = made;
  return first instanceof HTMLParagraphElement ? [...first.childNodes, ...rest] : made;
}

/** Text with code, bold, italics and links. @returns {(Node | string)[]} */
function inline(text, depth = 0) {
  const parts = [];
  let rest = text;
  for (let found = depth < DEEPEST ? INLINE.exec(rest) : null; found; found = INLINE.exec(rest)) {
    if (found.index) parts.push(rest.slice(0, found.index));
    const [whole, ticks, code, bold, star, line, label, address] = found;
    if (ticks) parts.push(el("code", { text: code.trim() || code }));
    else if (label) parts.push(el("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank", title: address }, ...inline(label, depth + 1)));
    else parts.push(el(bold ? "strong" : "em", {}, ...inline(bold ?? star ?? line, depth + 1)));
    rest = rest.slice(found.index + whole.length);
  }
  if (rest) parts.push(rest);
  return parts;
}
