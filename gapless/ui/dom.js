/** Making elements. Text goes in as text; nothing on this page ever parses HTML. */

/**
 * An element with attributes and children. Attribute `text` is its text, `onclick` and similar ones are listeners;
 * null, undefined and false leave an attribute out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** The same for SVG. @returns {any} */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** The element with this id, which index.html is known to hold. @returns {any} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html has no #${id}`);
  return found;
}

/** Set text only when it differs: writing the same text again costs a layout and wakes screen readers. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Hand a file to the browser's downloads. @param {string} name  @param {Blob} blob */
export function download(name, blob) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  // The download has begun by then; the bytes may go.
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
