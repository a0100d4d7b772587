// The pages of one session by tier, polled while the session is shown.

import { ask, segment } from "./api.js";
import { h, text } from "./dom.js";
import { many } from "./format.js";

const EVERY_MS = 2000;
const TIERS = [
  ["device", "Device"],
  ["host", "Host"],
  ["redis", "Redis"],
  ["disk", "Disk"],
];

export class Tiers {
  constructor() {
    this.session = null;
    this.timer = 0;
    this.words = h("p", { class: "under" });
    this.rows = TIERS.map(([tier, name]) => {
      const fill = h("span", { class: "bar-fill" });
      const meter = h("div", { class: "bar thin", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": `Pages in ${name}` }, fill);
      const number = h("span", { class: "number" });
      return { tier, fill, meter, number, element: h("div", { class: "tier", "data-tier": tier }, h("span", {}, name), meter, number) };
    });
    this.element = h("section", { class: "tiers", "aria-label": "Pages by tier", hidden: true }, this.words, ...this.rows.map((row) => row.element));
  }

  watch(session) {
    this.session = session;
    this.element.hidden = true; // what it shows is another's
    clearTimeout(this.timer);
    this.#look(session);
  }

  stop() {
    this.session = null;
    clearTimeout(this.timer);
  }

  async #look(session) {
    if (!document.hidden) {
      try {
        const { body } = await ask(`/v1/sessions/${segment(session)}/pages`, { signal: AbortSignal.timeout(10000) });
        if (this.session === session) this.#set(body);
      } catch (error) {
        if (this.session === session) text(this.words, error.message);
      }
    }
    if (this.session === session) this.timer = setTimeout(() => this.#look(session), EVERY_MS);
  }

  #set({ pages, tiers, worker }) {
    this.element.hidden = false;
    text(this.words, `${many(pages, "page")}${worker ? ` · held by ${worker}` : " · held by no worker"}`);
    for (const { tier, fill, meter, number } of this.rows) {
      const there = tiers[tier];
      const share = pages && there ? Math.min(100, (100 * there) / pages) : 0;
      fill.style.width = `${share}%`;
      meter.setAttribute("aria-valuenow", String(Math.round(share)));
      text(number, there === null ? "not known" : String(there));
    }
  }
}
