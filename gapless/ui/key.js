/** The dialog that asks for an API key when the server wants one. */

import { keyEvents, setKey } from "./api.js";

/** @param {HTMLDialogElement} dialog  @param {HTMLFormElement} form  @param {HTMLInputElement} input */
export function askForKeys(dialog, form, input) {
  keyEvents.addEventListener("needed", () => {
    if (!dialog.open) dialog.showModal();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!key) return;
    input.value = "";
    dialog.close();
    setKey(key);
  });
}
