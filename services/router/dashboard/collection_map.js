// One collection's map with a search whose hits are lit up on it and listed below.

import { ask, segment } from "./api.js";
import { h, text } from "./dom.js";
import { ago, count, many, percent, seconds } from "./format.js";
import { hitOf, listsRead, titleOf } from "./hits.js";
import { PointMap } from "./map.js";
import { remember, timelineOf } from "./recent.js";
import { section } from "./mesh.js";

const SAMPLE = 2000;
const AGAIN_MS = 1000;
const OUTDATED = 0.05; // of the chunks: the router has a map drawn anew when so many have changed
const LITTLE = 0.25; // of the differences: a map that shows less misleads
const ABOUT = "A sample of its chunks in the two directions in which they differ most. Click a point for what is nearest to it.";

export class CollectionMap {
  constructor() {
    this.map = new PointMap((point) => this.#near(point));
    this.label = h("label", { for: "map-text", class: "unseen" });
    this.input = h("input", { id: "map-text", type: "search", autocomplete: "off" });
    this.number = h("select", { id: "map-k", "aria-label": "How many" }, [5, 10, 20, 50].map((k) => h("option", { value: String(k) }, `${k} hits`)));
    this.button = h("button", { class: "primary", type: "submit" }, "Search");
    this.clear = h("button", { type: "button", hidden: true, onclick: () => this.#forget() }, "Clear");
    this.failed = h("p", { class: "error", role: "alert", hidden: true });
    this.caption = h("p", { class: "hint map-caption", role: "status" });
    this.status = h("p", { class: "meta", role: "status" });
    this.hits = h("ol", { class: "hits", "aria-label": "Hits" });
    this.element = section(
      "Map",
      ABOUT,
      h("form", { class: "ask", onsubmit: (event) => this.#search(event) }, this.label, this.input, this.number, this.button, this.clear),
      this.failed,
      this.map.element,
      this.caption,
      this.status,
      this.hits,
    );
    this.element.classList.add("map-panel");
    this.collection = null;
    this.timer = 0;
  }

  // Shows a collection as its description tells it; the map is asked for where it is another one's or outdated.
  set(collection) {
    const other = this.collection?.id !== collection.id;
    this.collection = collection;
    this.stopped = false;
    if (other) {
      this.stop();
      this.stopped = false;
      this.drawn = null;
      this.input.value = "";
      this.map.set([], "Nothing is drawn yet", true);
      text(this.caption, "Being drawn…");
      this.#forget();
    }
    const words = collection.model ? "Query" : "Id of a document: what is nearest to it";
    this.input.placeholder = words;
    text(this.label, collection.model ? "Search for" : words);
    const { chunks } = collection.stats;
    const outdated = this.drawn && Math.abs(chunks - this.drawn.rows) > OUTDATED * Math.max(this.drawn.rows, 1);
    if ((!this.drawn || outdated || this.drawn.pending) && !this.timer) this.#load();
  }

  // Asks for nothing more; what is shown stays.
  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.stopped = true;
  }

  get #path() {
    return `/v1/collections/${segment(this.collection.name)}`;
  }

  async #load() {
    const { id } = this.collection;
    this.timer = -1;
    let again = false;
    try {
      const { body } = await ask(`${this.#path}/map?sample=${SAMPLE}`);
      if (this.collection?.id !== id) return;
      again = body.pending;
      this.#draw(body);
    } catch (error) {
      if (this.collection?.id !== id) return;
      if (!this.drawn) text(this.caption, error.message);
    }
    this.timer = again && !this.stopped ? setTimeout(() => this.#load(), AGAIN_MS) : 0;
  }

  // What is being drawn anew in another plane takes the place of the old picture when it is whole.
  #draw(body) {
    const anew = body.basis !== this.drawn?.basis;
    if (this.drawn && anew && body.pending) return;
    const share = body.explained === null ? "" : `, showing ${percent(body.explained)} of all differences${body.explained < LITTLE ? ", so that chunks which lie together need not be alike" : ""}`;
    const words = body.points.length ? `${many(body.points.length, "chunk")} of ${count(body.rows)}${share}` : "This collection is empty";
    this.map.set(body.points, `Map of ${this.collection.name}: ${words}`, anew);
    const age = body.computed_at === null ? "" : ` · drawn ${ago(body.computed_at)}`;
    const waits = body.basis ? " · being drawn anew" : "Being drawn…";
    text(this.caption, body.basis || !body.pending ? `${words}${age}${body.pending ? waits : ""}` : waits);
    this.drawn = body;
    if (anew && this.found) this.#light(this.found);
  }

  async #search(event) {
    event.preventDefault();
    const words = this.input.value.trim();
    if (!words || !this.collection) return;
    if (this.collection.model) await this.#find({ text: words }, words);
    else await this.#near({ id: words, chunk: 0 });
  }

  // What is nearest to a stored chunk.
  async #near(point) {
    const name = `what is nearest to ${point.title ?? point.id}`;
    await this.#find(async () => {
      const { body } = await ask(`${this.#path}/documents/${encodeURIComponent(point.id)}?include=vectors`);
      return { vector: body.vectors[Math.min(point.chunk, body.vectors.length - 1)] };
    }, name);
  }

  // Searches by a query, or by what a function returns as one; an answer that comes after a later question is dropped.
  async #find(query, words) {
    const { id, metric } = this.collection;
    const nth = (this.asked = (this.asked ?? 0) + 1);
    this.#complain("");
    this.button.disabled = true;
    const began = performance.now();
    try {
      const body = { ...(typeof query === "function" ? await query() : query), k: Number(this.number.value), include_lists: true };
      const headers = { "Spillway-Resume": "30" }; // so that its timeline is kept
      const { body: found, request } = await ask(`${this.#path}/search`, { method: "POST", body, headers });
      if (nth !== this.asked || this.collection?.id !== id) return;
      remember(request, words);
      const took = (performance.now() - began) / 1000;
      this.status.replaceChildren(`${many(found.data.length, "hit")} for ${words} in ${seconds(took)}, by ${found.path}${listsRead(found.search)} · `, h("a", { href: timelineOf(request) }, "timeline"));
      this.clear.hidden = false;
      this.#list(found.data, metric);
      this.button.disabled = false; // Enter asks again, while the map still looks for these hits
      await this.#light(found.data);
    } catch (error) {
      if (nth !== this.asked) return;
      this.#forget();
      this.#complain(error.message);
    } finally {
      if (nth === this.asked) this.button.disabled = false;
    }
  }

  // Where the hits lie in the plane of the map that is shown; it may hold none of them, being a sample.
  async #light(found) {
    this.found = found;
    if (!found.length || !this.drawn?.basis) {
      this.map.light([]);
      return;
    }
    const hits = found.map(({ id, chunk }) => ({ id, chunk }));
    const { body } = await ask(`${this.#path}/map`, { method: "POST", body: { hits, basis: this.drawn.basis } });
    if (this.found !== found) return;
    const places = new Map(body.data.map((point) => [`${point.chunk} ${point.id}`, point]));
    const lit = [];
    found.forEach((hit, i) => {
      const place = places.get(`${hit.chunk} ${hit.id}`);
      if (place) lit.push({ ...place, rank: i + 1 });
    });
    this.map.light(lit);
    this.lit = new Map(lit.map((point) => [point.rank, point]));
  }

  #list(found, metric) {
    this.lit = new Map();
    const items = found.map((hit, i) => {
      const place = () => this.lit.get(i + 1);
      const show = h("button", { class: "plain", type: "button", "aria-label": `Show hit ${i + 1}, ${titleOf(hit)}, on the map`, onclick: () => place() && this.map.centre(place()) }, `${i + 1} on the map`);
      const item = hitOf(hit, metric, show);
      const mark = (point) => this.map.mark(point ?? null);
      item.addEventListener("mouseenter", () => mark(place()));
      item.addEventListener("mouseleave", () => mark(null));
      item.addEventListener("focusin", () => mark(place()));
      item.addEventListener("focusout", () => mark(null));
      return item;
    });
    this.hits.replaceChildren(...items);
  }

  #forget() {
    this.found = null;
    this.asked = (this.asked ?? 0) + 1;
    this.lit = new Map();
    this.button.disabled = false;
    this.clear.hidden = true;
    this.hits.replaceChildren();
    this.status.replaceChildren();
    this.#complain("");
    this.map.light([]);
  }

  #complain(words) {
    this.failed.hidden = !words;
    text(this.failed, words);
  }
}
