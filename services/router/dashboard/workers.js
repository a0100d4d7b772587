// Workers: model, depth, cost, and the last batch of each. A dead worker is shown as lost until its record expires.

import { Rows, h, table, text } from "./dom.js";
import { bound, count, many, seconds } from "./format.js";

const COLUMNS = ["Worker", "Serves", "State", "Depth", "Cost", "Last batch", "Batches"];
const ORDER = ["router", "gpu_worker", "cpu_worker", "vector_search", "kv_store"];
const SERVES = { request: "requests", search: "search", sessions: "sessions" };

export class Workers {
  constructor() {
    const { element, body, cells } = table("Workers", COLUMNS);
    this.element = h("div", { class: "tabled" }, element);
    this.rows = new Rows(body, () => new Row(cells()));
  }

  set({ workers, time }) {
    const place = (worker) => ORDER.indexOf(worker.service) + (worker.state === "lost" ? ORDER.length : 0);
    const sorted = [...workers].sort((a, b) => place(a) - place(b));
    this.rows.set(sorted.map((worker) => ({ ...worker, time })), (worker) => `${worker.name} ${worker.kind}`);
  }
}

class Row {
  constructor({ row, made }) {
    this.element = row;
    [this.worker, this.serves, this.state, this.depth, this.cost, this.last, this.batches] = made;
    this.service = h("strong");
    this.name = h("span", { class: "under mono" });
    this.worker.append(h("div", {}, this.service, this.name));
    this.what = h("span");
    this.where = h("span", { class: "under" });
    this.serves.append(h("div", {}, this.what, this.where));
    this.pill = h("span", { class: "pill" });
    this.since = h("span", { class: "under" });
    this.state.append(h("div", {}, this.pill, this.since));
  }

  set(worker) {
    this.element.className = worker.state;
    this.element.dataset.worker = worker.name;
    this.element.dataset.service = worker.service;
    text(this.service, worker.service || worker.name.split("-")[0]);
    text(this.name, worker.name.split("-").slice(1, -1).join("-"));
    this.name.title = worker.name;
    text(this.what, worker.model ?? SERVES[worker.kind] ?? worker.kind);
    text(this.where, worker.kind === "search" ? many(worker.shards, "shard") : `${worker.kind === "embed" || worker.kind === "chat" || worker.kind === "rerank" ? `${worker.kind}, ` : ""}${worker.classes.join(", ")} lane on ${worker.device}`);
    this.pill.className = `pill ${worker.state}`;
    text(this.pill, worker.state);
    text(this.since, worker.state === "lost" ? "no heartbeat" : `up ${seconds(Math.max(0, Math.floor(worker.time - worker.started)))}`);
    text(this.depth, depth(worker.depth));
    text(this.cost, cost(worker.cost));
    const last = worker.last_batch;
    text(this.last, last ? `${many(last.items, "item")}${last.tokens ? `, ${many(last.tokens, "token")}` : ""} in ${seconds(last.seconds)}` : "–");
    text(this.batches, count(worker.batches));
  }
}

function depth({ items, tokens }) {
  const known = [`${bound(items)} items`];
  if (tokens && bound(tokens) !== "∞") known.push(`${bound(tokens)} tokens`);
  return known.join(", ");
}

function cost({ beta_s: beta, alpha_items_s: items, alpha_tokens_s: tokens }) {
  const parts = [];
  if (beta) parts.push(seconds(beta));
  if (items) parts.push(`${seconds(items)} an item`);
  if (tokens) parts.push(`${seconds(tokens)} a token`);
  return parts.join(" + ") || "–";
}
