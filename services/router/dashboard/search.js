// Collections, and the passages that a search finds in one, with their scores.

import { ask, segment } from "./api.js";
import { all } from "./collection_names.js";
import { h, text } from "./dom.js";
import { many, percent, seconds } from "./format.js";
import { hitOf, listsRead } from "./hits.js";
import { remember, timelineOf } from "./recent.js";

const MODES = { vector: "by meaning", text: "by words", hybrid: "by both" };
const DIVERSITY = { "": "best hits", 0.5: "hits that differ" }; // by the `lambda` of maximal marginal relevance

const choice = (id, label, choices) => h("select", { id, "aria-label": label }, Object.entries(choices).map(([value, words]) => h("option", { value }, words)));

export class Search {
  title = "Search";

  constructor() {
    this.list = h("div", { class: "collections", role: "radiogroup", "aria-label": "Collection" });
    this.input = h("input", { id: "search-text", type: "search", placeholder: "Query", autocomplete: "off" });
    this.mode = choice("search-mode", "How to search", MODES);
    this.diversity = choice("search-diversity", "Which hits", DIVERSITY);
    this.number = h("select", { id: "search-k", "aria-label": "How many" }, [5, 10, 20].map((k) => h("option", { value: String(k) }, `${k} hits`)));
    this.button = h("button", { class: "primary", type: "submit" }, "Search");
    this.status = h("p", { class: "meta", role: "status" });
    this.failed = h("p", { class: "error", role: "alert", hidden: true });
    this.hits = h("ol", { class: "hits", "aria-label": "Hits" });
    this.element = h(
      "div",
      { class: "view search" },
      h("h1", { class: "unseen" }, "Search"),
      this.list,
      h("form", { class: "ask", onsubmit: (event) => this.#search(event) }, h("label", { for: "search-text", class: "unseen" }, "Search for"), this.input, this.mode, this.diversity, this.number, this.button),
      this.failed,
      this.status,
      this.hits,
    );
    this.asked = 0;
    this.chosen = "";
    this.metrics = new Map(); // collection -> metric
  }

  // A list that arrives after a later one was asked for is dropped.
  async show() {
    const nth = ++this.asked;
    try {
      const known = await all();
      if (nth !== this.asked) return;
      const found = known.map(({ name }) => name);
      this.metrics = new Map(known.map(({ name, metric }) => [name, metric]));
      this.#complain(found.length ? "" : "There is no collection yet: `spillway ingest NAME FOLDER` makes one.");
      if (!found.includes(this.chosen)) this.chosen = found.includes("handbook") ? "handbook" : (found[0] ?? "");
      this.list.replaceChildren(...found.map((name) => this.#choice(name)));
      this.input.focus({ preventScroll: true });
    } catch (error) {
      if (nth !== this.asked) return;
      if (error.locked) [this.list, this.hits, this.status].forEach((element) => element.replaceChildren());
      this.#complain(error.message);
    }
  }

  #choice(name) {
    const about = h("span", { class: "under" });
    const radio = h("input", { type: "radio", name: "collection", value: name, onchange: () => (this.chosen = name) });
    radio.checked = name === this.chosen;
    ask(`/v1/collections/${segment(name)}`)
      .then(({ body }) => {
        const stats = body.stats ?? {};
        text(about, [stats.documents !== undefined && many(stats.documents, "document"), stats.chunks !== undefined && many(stats.chunks, "chunk")].filter(Boolean).join(" · "));
      })
      .catch((error) => text(about, error.message));
    return h("label", { class: "collection" }, radio, h("span", {}, h("strong", {}, name), about));
  }

  async #search(event) {
    event.preventDefault();
    const words = this.input.value.trim();
    if (!words || !this.chosen) return;
    this.#complain("");
    this.button.disabled = true;
    const began = performance.now();
    try {
      const { body, request } = await ask(`/v1/collections/${segment(this.chosen)}/search`, {
        method: "POST",
        body: { text: words, include_lists: this.mode.value === "vector" && !this.diversity.value, k: Number(this.number.value), mode: this.mode.value, ...(this.diversity.value && { mmr: { lambda: Number(this.diversity.value) } }) },
        headers: { "Spillway-Resume": "30" }, // so that its timeline is kept
      });
      remember(request, words);
      const took = (performance.now() - began) / 1000;
      const metric = body.mode === "vector" ? this.metrics.get(this.chosen) : null; // other scores have no scale
      this.hits.replaceChildren(...body.data.map((hit) => hitOf(hit, metric)));
      const indexed = body.text_indexed === undefined ? "" : `, ${percent(body.text_indexed)} of the texts are indexed so far`;
      this.status.replaceChildren(`${many(body.data.length, "hit")} ${MODES[body.mode]} in ${seconds(took)}${indexed}${listsRead(body.search)} · `, h("a", { href: timelineOf(request) }, "timeline"));
    } catch (error) {
      this.hits.replaceChildren();
      this.status.replaceChildren();
      this.#complain(error.message);
    } finally {
      this.button.disabled = false;
    }
  }

  #complain(words) {
    this.failed.hidden = !words;
    text(this.failed, words);
  }
}
