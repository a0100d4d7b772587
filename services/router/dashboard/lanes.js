// Lanes: used share of the depth, now and over the last minutes.

import { Rows, h, text } from "./dom.js";
import { bound, count, many, percent, seconds, share } from "./format.js";
import { Spark } from "./spark.js";

const ORDER = ["chat", "embed", "rerank", "search", "request", "sessions"];
const NAMES = {
  search: ["Vector search", "all collections"],
  request: ["Workflows", "requests of several jobs: grounded answers, searches, writes"],
  sessions: ["Sessions", "list, export, import, delete, pin"],
};
export const NEARLY_FULL = 0.8;
const ROLES = { gpu: "main lane", cpu: "overflow lane" };

export class Lanes {
  constructor() {
    this.element = h("ul", { class: "lanes" });
    this.rows = new Rows(this.element, (lane) => new Lane(lane));
  }

  set({ lanes, time, history_every_s: everyS }) {
    const place = (lane) => ORDER.indexOf(lane.kind) * 2 + (lane.class === "cpu" ? 1 : 0);
    const sorted = [...lanes].sort((a, b) => place(a) - place(b) || a.lane.localeCompare(b.lane));
    this.rows.set(sorted.map((lane) => ({ ...lane, time, everyS })), (lane) => lane.lane);
  }
}

class Lane {
  constructor(lane) {
    const [name, about] = NAMES[lane.kind] ?? [lane.model ?? lane.lane, `${lane.kind} · ${ROLES[lane.class] ?? lane.class}`];
    this.spark = new Spark(`Use of ${name} over the last five minutes`);
    this.used = h("span", { class: "lane-share" });
    this.bar = h("span", { class: "bar-fill" });
    this.meter = h("div", { class: "bar", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": `Use of ${name}` }, this.bar);
    this.depth = h("p", { class: "lane-depth" });
    this.age = h("span", { class: "lane-age" });
    this.served = h("span", { class: "under" });
    this.facts = h("p", { class: "lane-facts" }, this.age, this.served);
    this.element = h(
      "li",
      { class: "lane", "data-lane": lane.lane },
      h("div", { class: "lane-name" }, h("h3", {}, name), h("p", {}, about)),
      h("div", { class: "lane-use" }, h("div", { class: "lane-line" }, this.meter, this.used), this.depth),
      this.spark.element,
      this.facts,
    );
  }

  set(lane) {
    const full = Math.max(share(lane.items), share(lane.tokens));
    this.spark.seed(lane.history, lane.everyS, lane.time);
    this.spark.add(full, lane.time);
    this.bar.style.width = `${Math.min(100, 100 * full)}%`;
    this.meter.setAttribute("aria-valuenow", String(Math.min(100, Math.round(100 * full))));
    text(this.used, lane.workers ? percent(full) : "no worker");
    this.element.classList.toggle("nearly-full", full >= NEARLY_FULL);
    this.element.classList.toggle("unserved", lane.workers === 0);
    const units = [`${count(lane.items.used)} of ${bound(lane.items.depth)} items`];
    if (lane.tokens.depth && bound(lane.tokens.depth) !== "∞") units.push(`${count(lane.tokens.used)} of ${bound(lane.tokens.depth)} tokens`);
    text(this.depth, lane.workers ? units.join(" · ") : "no worker serves this lane");
    const busy = lane.items.used > 0 || lane.pending > 0;
    text(this.age, busy ? `${count(lane.pending)} running, oldest ${seconds(lane.oldest_age_s)}` : "idle");
    text(this.served, `${many(lane.workers, "worker")}${lane.kind === "search" ? `, ${many(lane.shards, "shard")}` : ""}`);
  }
}
