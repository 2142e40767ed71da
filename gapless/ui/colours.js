/** The style sheet's colours, for canvases: they cannot read custom properties themselves. */

const known = new Map();
const probe = document.createElement("span");
probe.hidden = true;

/** The colour of a custom property, such as `--busy`, in the theme of now. */
export function colour(property) {
  let value = known.get(property);
  if (value === undefined) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${property})`;
    value = getComputedStyle(probe).color;
    known.set(property, value);
  }
  return value;
}

/** The custom property of a cause; causes that the page does not know share one. */
export function causeProperty(key) {
  return `--cause-${key.replaceAll("_", "-")}`;
}

/** Call `changed` when the theme does, after the old colours are forgotten. */
export function onTheme(changed) {
  const renew = () => {
    known.clear();
    changed();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  new MutationObserver(renew).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}
