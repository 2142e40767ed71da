/** Light, dark, or as the system says. */

const THEMES = ["auto", "light", "dark"];
const STORED = "gapless-theme";

/** @param {HTMLButtonElement} button */
export function themeButton(button) {
  const stored = localStorage.getItem(STORED) ?? "auto";
  let theme = THEMES.includes(stored) ? stored : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(STORED, theme);
    apply();
  });
  apply();
}
