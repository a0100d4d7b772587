// Asks for the API key where the router needs one.

import { key, keyNeeded } from "./api.js";
import { text } from "./dom.js";

export class KeyDialog {
  constructor(changed) {
    this.dialog = document.getElementById("key");
    this.input = document.getElementById("key-text");
    this.button = document.getElementById("change-key");
    this.dismissed = false;
    this.button.addEventListener("click", () => this.#open("Another key can be used from here on."));
    document.getElementById("key-later").addEventListener("click", () => {
      this.dismissed = true;
      this.dialog.close();
    });
    this.dialog.querySelector("form").addEventListener("submit", () => {
      this.dismissed = false;
      key.set(this.input.value.trim());
      this.input.value = "";
      changed();
    });
    keyNeeded.addEventListener("needed", ({ detail }) => {
      this.button.hidden = false;
      if (!this.dismissed) this.#open(key.get() ? `The router refused this key: ${detail}` : "This router answers only requests with a key.");
    });
  }

  keysAre(on) {
    this.button.hidden = !on;
  }

  #open(why) {
    text(document.getElementById("key-why"), why);
    if (!this.dialog.open) this.dialog.showModal();
  }
}
