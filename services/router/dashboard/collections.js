// The collections: a table of all, and the one that was chosen, looked at again and again while it is shown.

import { ask, segment } from "./api.js";
import { Collection } from "./collection.js";
import { all } from "./collection_names.js";
import { Rows, h, table, text } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const EVERY_MS = 5000;
const PAGE = 50;
const AT_ONCE = 4;
const COLUMNS = ["Collection", "Documents", "Chunks", "Vectors", "Index", "Recall", "Slow", "Newer", "Deleted", "On disk"];

export class Collections {
  title = "Collections";

  constructor() {
    const { element, body, cells } = table("Collections", COLUMNS);
    this.rows = new Rows(body, () => new CollectionRow(cells()));
    this.tabled = h("div", { class: "tabled" }, element);
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.#page() }, "Show more");
    this.empty = h("p", { class: "quiet", hidden: true }, "There is no collection yet: `spillway ingest NAME FOLDER` makes one.");
    this.list = h("section", { class: "panel", "aria-label": "Collections", hidden: true }, this.tabled, this.more, this.empty);
    this.failed = h("p", { class: "error", role: "alert", hidden: true });
    this.detail = new Collection();
    this.element = h("div", { class: "view collections-view" }, h("h1", { class: "unseen" }, "Collections"), this.failed, this.list, this.detail.element);
    this.known = new Map(); // name -> the collection, with its statistics once they are known
    this.shownRows = PAGE;
    this.asked = 0;
    this.timer = 0;
  }

  async show(argument) {
    clearTimeout(this.timer);
    const nth = ++this.asked;
    this.chosen = argument;
    if (this.detail.shown && this.detail.shown.name !== argument) this.detail.close();
    await Promise.all([this.#load(nth), argument ? this.#look(nth, true) : null]);
    this.#wait(nth);
  }

  hide() {
    clearTimeout(this.timer);
    this.asked += 1;
    this.detail.stop();
  }

  #wait(nth) {
    if (nth !== this.asked) return;
    this.timer = setTimeout(async () => {
      if (!document.hidden) await Promise.all([this.#load(nth), this.chosen ? this.#look(nth) : null]);
      this.#wait(nth);
    }, EVERY_MS);
  }

  // A list that arrives after a later one was asked for is dropped.
  async #load(nth) {
    try {
      const found = await all();
      if (nth !== this.asked) return;
      const before = this.known;
      this.known = new Map(found.map((one) => [one.name, before.get(one.name)?.id === one.id ? before.get(one.name) : one]));
      this.list.hidden = false;
      this.empty.hidden = found.length > 0;
      this.tabled.hidden = found.length === 0;
      if (!this.gone) this.#complain("");
      this.#draw();
      await this.#statistics(nth);
    } catch (error) {
      if (nth !== this.asked) return;
      if (error.locked) {
        this.list.hidden = true;
        this.detail.close();
      }
      this.#complain(error.message);
    }
  }

  #draw() {
    const known = [...this.known.values()];
    this.rows.set(known.slice(0, this.shownRows).map((one) => ({ ...one, current: one.name === this.chosen })), ({ id }) => id);
    this.more.hidden = known.length <= this.shownRows;
  }

  #page() {
    this.shownRows += PAGE;
    this.#draw();
    this.#statistics(this.asked);
  }

  // Asks for the statistics that are not known yet, of a few collections at a time.
  async #statistics(nth) {
    const names = [...this.known.values()].slice(0, this.shownRows).filter(({ stats }) => !stats).map(({ name }) => name);
    const some = async () => {
      for (let name = names.shift(); name !== undefined && nth === this.asked; name = names.shift()) {
        const { body } = await ask(`/v1/collections/${segment(name)}`).catch((error) => ({ body: { ...this.known.get(name), error: error.message } }));
        if (nth === this.asked && this.known.get(name)?.id === body.id) this.#know(body);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, some));
  }

  #know(collection) {
    this.known.set(collection.name, collection);
    this.#draw();
  }

  // Looks at the chosen collection, which may be deleted meanwhile.
  async #look(nth, first = false) {
    const name = this.chosen;
    try {
      const { body } = await ask(`/v1/collections/${segment(name)}`);
      if (nth !== this.asked) return;
      if (this.gone) this.#complain("");
      this.gone = false;
      this.detail.set(body);
      this.#know(body);
      if (!first) return;
      this.detail.element.focus({ preventScroll: true });
      this.detail.element.scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (nth !== this.asked) return;
      this.gone = error.code === "collection_not_found";
      const watched = this.detail.shown?.name === name;
      if (this.gone || error.locked) this.detail.close();
      this.#complain(this.gone && watched ? `Collection ${name} was deleted.` : error.message);
    }
  }

  #complain(words) {
    this.failed.hidden = !words;
    text(this.failed, words);
  }
}

class CollectionRow {
  constructor({ row, made }) {
    this.element = row;
    this.made = made;
    this.link = h("a");
    this.model = h("span", { class: "under" });
    made[0].append(h("div", {}, this.link, this.model));
  }

  set({ name, model, dimension, metric, stats, error, current }) {
    this.element.dataset.collection = name;
    this.element.classList.toggle("current", current);
    this.link.href = `#/collections/${encodeURIComponent(name)}`;
    text(this.link, name);
    if (current) this.link.setAttribute("aria-current", "true");
    else this.link.removeAttribute("aria-current");
    text(this.model, error ?? model ?? "vectors only");
    const words = stats
      ? [count(stats.documents), count(stats.chunks), null, stats.index, stats.index === "exact" ? "1" : stats.recall.toFixed(3), count(stats.searches?.scan ?? 0), count(stats.newer ?? 0), percent(stats.deleted_ratio ?? 0), bytes(stats.bytes)]
      : ["…", "…", null, "…", "…", "…", "…", "…", "…"];
    words[2] = `${dimension}, ${metric}`;
    words.forEach((word, i) => text(this.made[i + 1], word));
  }
}
