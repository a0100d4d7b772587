// One collection: its figures, how it is searched and why, its shards with their replicas, its map.

import { ask, segment } from "./api.js";
import { CollectionMap } from "./collection_map.js";
import { Rows, h, table, text } from "./dom.js";
import { ago, bytes, count, many, percent, seconds } from "./format.js";
import { figure, section } from "./mesh.js";
import { Tuning } from "./tuning.js";

const SPACE = 2 ** 32; // of the hashes that divide documents among shards
const PATHS = {
  exact: "every chunk is compared",
  graph: "the graph is walked, chunks it lacks are compared",
  ivfpq: "the codes of the nearest lists are scored, the best and chunks in no list are compared",
  "filtered-exact": "the chunks that the filter allows are compared",
  "filtered-graph": "the graph is walked, what the filter forbids is left out",
  "filtered-ivfpq": "more lists are read, what the filter forbids is left out",
  scan: "slow: a filter left too little of what the graph found, so all allowed chunks were compared",
};
const KINDS = {
  exact: "Every search compares its query with every chunk, and so finds all true neighbours: there are too few for a graph to be faster.",
  graph: "A search walks a graph over the chunks and keeps the best candidates on its way; newer chunks are compared one by one until the graph has them.",
  ivfpq: "A search reads the lists that are nearest to its query: short codes of the chunks, of which the best are compared; newer chunks are compared one by one until they are in a list.",
};
// What is built over the chunks, by the path of a search.
const BUILT = { graph: "graph", ivfpq: "lists" };
const absent = new Set(); // routes that this router does not have

// What a route answers, null where the router has none of that kind.
async function optional(name, path) {
  if (absent.has(name)) return null;
  try {
    return (await ask(path)).body;
  } catch (error) {
    if (error.code === "route_not_found") absent.add(name);
    return null;
  }
}

export class Collection {
  constructor() {
    this.name = h("h2");
    this.about = h("p", { class: "under" });
    this.figures = ["Chunks", "Recall", "Slow paths", "Newer", "Deleted", "On disk"].map((name) => figure(name));
    this.why = h("div", { class: "why" });
    this.paths = new PathTable();
    this.efforts = new EffortTable();
    this.shards = new ShardTable();
    this.placed = section("Shards and replicas", "Where its parts are kept, and which of their copies serve.", this.shards.element);
    this.tuning = new Tuning();
    this.map = new CollectionMap();
    this.element = h(
      "section",
      { class: "collection-detail", "aria-label": "Collection", tabindex: "-1", hidden: true },
      h("div", { class: "heading" }, this.name, this.about),
      h("dl", { class: "figures six" }, this.figures.map(({ element }) => element)),
      this.map.element,
      section("How it is searched", "The index, the paths that searches took since its process began, and what an audit measured.", this.why, this.paths.element, this.efforts.element),
      this.tuning.element,
      this.placed,
    );
  }

  set(collection) {
    const { stats } = collection;
    const other = this.shown?.id !== collection.id;
    this.shown = collection;
    this.element.hidden = false;
    this.element.dataset.collection = collection.name;
    text(this.name, collection.name);
    text(this.about, [collection.model ?? "vectors only", `dimension ${collection.dimension}`, collection.metric, `created ${ago(collection.created)}`].join(" · "));
    this.#figures(stats);
    this.paths.set(stats.searches ?? {});
    if (other) {
      this.placed.hidden = true;
      this.tuning.set(null);
      this.efforts.set([]);
      this.#explain([]);
    }
    this.map.set(collection);
    this.#more(collection);
  }

  // Asks for nothing more; what is shown stays.
  stop() {
    this.map.stop();
  }

  close() {
    this.stop();
    this.shown = null;
    this.element.hidden = true;
  }

  #figures(stats) {
    const [chunks, recall, slow, newer, deleted, disk] = this.figures;
    const searches = Object.values(stats.searches ?? {}).reduce((sum, n) => sum + n, 0);
    const scans = stats.searches?.scan ?? 0;
    chunks.set(count(stats.chunks), many(stats.documents, "document"));
    recall.set(BUILT[stats.index] ? stats.recall.toFixed(3) : "1", audit(stats), BUILT[stats.index] && stats.recall < 0.95);
    slow.set(count(scans), searches ? `of ${many(searches, "query")}` : "no search yet", scans > 0);
    newer.set(count(stats.newer ?? 0), BUILT[stats.index] ? `not in the ${BUILT[stats.index]} yet` : "there is no graph");
    deleted.set(percent(stats.deleted_ratio ?? 0), "of the rows");
    disk.set(bytes(stats.bytes), `${bytes(stats.log_bytes ?? 0)} of it in the log`);
  }

  // What other routes tell, where this router has them.
  async #more(collection) {
    const path = `/v1/collections/${segment(collection.name)}`;
    const [explained, shards, tuning] = await Promise.all([optional("explain", `${path}/explain`), optional("shards", `${path}/shards`), optional("tune", `${path}/tune`)]);
    if (this.shown?.id !== collection.id) return;
    this.#explain(explained?.shards ?? []);
    this.efforts.set(explained?.shards ?? []);
    this.tuning.set(tuning);
    this.placed.hidden = !shards;
    if (shards) this.shards.set(shards.data);
  }

  #explain(shards) {
    const { stats } = this.shown;
    const words = shards.length ? shards.map(({ shard, kind, why }) => `${shards.length > 1 ? `Shard ${shard}: ` : ""}${kind}. ${why}`) : [KINDS[stats.index] ?? ""];
    this.why.replaceChildren(...words.map((one) => h("p", {}, one)), h("p", { class: "hint" }, audited(stats)));
  }
}

// When the recall was measured, in a few words.
function audit({ index, audited_at: at }) {
  if (!BUILT[index]) return "all are compared";
  return at ? `audited ${ago(at)}` : `when the ${BUILT[index]} ${index === "graph" ? "was" : "were"} built`;
}

function audited({ index, recall, ef, compared, audited_at: at }) {
  if (!BUILT[index]) return "There is nothing to audit: an exact search is what audits compare with.";
  const measured = at ? `The last audit, ${ago(at)}, compared ${many(compared, "recent query")} with exact searches` : `When the ${BUILT[index]} ${index === "graph" ? "was" : "were"} built, chunks were searched for as if they were not there; no recent query has been compared with an exact search yet`;
  return `${measured}: ${percent(recall)} of the true neighbours were found, with ${index === "graph" ? `${count(ef)} candidates kept (ef)` : many(ef, "list") + " read"}.`;
}

class PathTable {
  constructor() {
    const { element, body, cells } = table("Queries by path", ["Path", "Queries", "Share", "What happens"]);
    this.element = h("div", { class: "tabled" }, element);
    this.rows = new Rows(body, () => new Row(cells()));
  }

  set(searches) {
    const all = Object.values(searches).reduce((sum, n) => sum + n, 0);
    this.element.hidden = all === 0;
    const rows = Object.entries(searches).sort((a, b) => b[1] - a[1]);
    this.rows.set(rows.map(([path, n]) => ({ key: path, words: [path, count(n), percent(n / all), PATHS[path] ?? ""], bad: path === "scan" })), ({ key }) => key);
  }
}

class EffortTable {
  constructor() {
    const { element, body, cells } = table("Efforts", ["Effort", "Recall", "Path", "Predicted"]);
    this.element = h("div", { class: "tabled efforts" }, element);
    this.rows = new Rows(body, () => new Row(cells()));
  }

  set(shards) {
    const efforts = shards.flatMap(({ shard, efforts: some = [] }) => some.map((one) => ({ shard, ...one })));
    this.element.hidden = !efforts.length;
    const name = ({ shard, effort }) => `${shards.length > 1 ? `shard ${shard}: ` : ""}${effort}`;
    const rows = efforts.map((one) => ({ key: name(one), words: [name(one), one.recall === null ? "–" : one.recall.toFixed(3), one.path, one.predicted_ms === null ? "–" : seconds(one.predicted_ms / 1000)] }));
    this.rows.set(rows, ({ key }) => key);
  }
}

class ShardTable {
  constructor() {
    const { element, body, cells } = table("Shards", ["Shard", "Documents", "Chunks", "On disk", "State", "Replicas"]);
    this.element = h("div", { class: "tabled" }, element);
    this.rows = new Rows(body, () => new ShardRow(cells()));
  }

  set(shards) {
    const known = (value, form) => (value === null || value === undefined ? "–" : form(value));
    const rows = shards.map((one) => ({
      key: String(one.shard),
      words: [one.shard, rangeOf(one), known(one.rows, count), known(one.bytes, bytes), stateOf(one)],
      bad: one.served === false,
      replicas: one.replicas ?? [],
    }));
    this.rows.set(rows, ({ key }) => key);
  }
}

const rangeOf = ({ low, high }) => (low === undefined || (low === 0 && high === SPACE) ? "all" : `${percent((high - low) / SPACE)} of them`);

function stateOf({ served, split }) {
  if (served === false) return "not served";
  return split ? `being split into ${split.numbers.join(" and ")}` : "served";
}

class Row {
  constructor({ row, made }) {
    Object.assign(this, { element: row, made });
  }

  set({ key, words, bad = false }) {
    this.element.dataset.row = key;
    this.element.classList.toggle("bad", bad);
    words.forEach((word, i) => text(this.made[i], word));
  }
}

class ShardRow {
  constructor({ row, made }) {
    this.cells = new Row({ row, made });
    this.element = row;
    this.list = h("ul", { class: "replicas" });
    made.at(-1).append(this.list);
  }

  set({ replicas, ...rest }) {
    this.cells.set(rest);
    this.list.replaceChildren(...replicas.map(replicaOf));
  }
}

function replicaOf({ name, state, alive, why }) {
  const words = alive === false ? "lost" : state;
  return h("li", {}, h("span", { class: "mono" }, name), " ", h("span", { class: `pill ${alive === false ? "lost" : state === "serving" ? "ready" : "draining"}` }, words), why ? h("span", { class: "under" }, why) : null);
}
