// Latencies and refusals of this router over the last minutes.

import { Rows, h, table, text } from "./dom.js";
import { count, seconds } from "./format.js";

const COLUMNS = ["Route", "Count", "p50", "p95", "p99"];
const ROUTES = {
  "/v1/chat/completions": "Chat, whole answer",
  "/v1/completions": "Completion, whole answer",
  "/v1/embeddings": "Embeddings",
  "/v1/rerank": "Rerank",
  "/rerank": "Rerank",
  "/v1/collections/{name}/search": "Search",
  "/v1/collections/{name}/documents": "Documents stored or listed",
};
export const REASONS = {
  depth: "every lane was full of items",
  tokens: "every lane was full of tokens",
  deadline: "no lane could finish in time",
  quota: "a key's quota was spent",
  draining: "the router was stopping",
  bus_full: "Redis was full",
  no_worker: "no worker was up",
  session_busy: "the session was in a turn",
  session_changed: "the session had changed",
  session_not_found: "no such session",
};

export class Traffic {
  constructor() {
    const { element, body, cells } = table("Latencies", COLUMNS);
    this.times = new Rows(body, () => new Times(cells()));
    this.tabled = h("div", { class: "tabled" }, element);
    this.quiet = h("p", { class: "quiet" }, "No request was answered yet.");
    this.refusals = h("ul", { class: "refusals" });
    this.reasons = new Rows(this.refusals, () => new Reason());
    this.none = h("p", { class: "quiet" }, "No request was refused.");
    this.about = h("p");
    this.element = h(
      "div",
      { class: "halves" },
      h("section", { class: "panel", "aria-label": "Latencies" }, h("div", { class: "heading" }, h("h2", {}, "Latencies"), this.about), this.tabled, this.quiet),
      h("section", { class: "panel", "aria-label": "Refusals" }, h("div", { class: "heading" }, h("h2", {}, "Refusals"), h("p", {}, "Requests refused at admission, by reason.")), this.refusals, this.none),
    );
  }

  set({ window }) {
    text(this.about, `Of this router, over the last ${seconds(Math.max(1, Math.round(window.seconds)))}.`);
    const rows = [
      ...window.first_token.map((of) => ({ ...of, name: `First token, ${of.model}` })),
      ...window.per_token.map((of) => ({ ...of, name: `Between tokens, ${of.model}` })),
      ...window.routes.map((of) => ({ ...of, name: ROUTES[of.route] ?? of.route })),
    ];
    this.times.set(rows, (row) => row.route ?? row.name);
    this.quiet.hidden = rows.length > 0;
    this.tabled.hidden = rows.length === 0;
    const most = Math.max(1, ...window.refused.map((of) => of.count));
    this.reasons.set(window.refused.map((of) => ({ ...of, most })), (of) => of.reason);
    this.none.hidden = window.refused.length > 0;
  }
}

class Times {
  constructor({ row, made }) {
    this.element = row;
    this.cells = made;
    made.slice(1).forEach((cell) => cell.classList.add("number"));
  }

  set(of) {
    const [what, times, ...quantiles] = this.cells;
    text(what, of.name);
    const bad = [of.refused && `${count(of.refused)} refused`, of.failed && `${count(of.failed)} failed`].filter(Boolean);
    text(times, bad.length ? `${count(of.count)} (${bad.join(", ")})` : count(of.count));
    [of.p50_s, of.p95_s, of.p99_s].forEach((value, i) => text(quantiles[i], seconds(value)));
  }
}

class Reason {
  constructor() {
    this.words = h("span");
    this.number = h("span", { class: "number" });
    this.fill = h("span", { class: "bar-fill" });
    this.element = h("li", {}, h("div", { class: "reason" }, this.words, this.number), h("div", { class: "bar thin", "aria-hidden": "true" }, this.fill));
  }

  set({ reason, count: times, most }) {
    this.element.dataset.reason = reason;
    text(this.words, REASONS[reason] ?? reason);
    text(this.number, count(times));
    this.fill.style.width = `${(100 * times) / most}%`;
  }
}
