// The jobs of a request as bars on one axis of time: waiting, running, answering.

import { h, text } from "./dom.js";
import { many, seconds } from "./format.js";

const STAGES = {
  request: "Request",
  rewrite: "Rewrite the question",
  embed: "Embed the text",
  part: "Embed",
  search: "Search",
  rerank: "Rerank",
  quotes: "Embed sentences",
  known: "Look up documents",
  generate: "Generate",
};
const STEPS = [1, 2, 5];
const SEEN = 0.004; // of the whole: a shorter wait is no bar
const SERVICES = { gpu: "gpu_worker", cpu: "cpu_worker", search: "vector_search", kv: "kv_store", router: "router" };

export function stageName({ stage, index, kind }) {
  const name = stage === "request" && kind === "chat" ? STAGES.generate : stage === "request" && kind === "embed" ? STAGES.part : (STAGES[stage] ?? stage);
  return index ? `${name} ${index + 1}` : name;
}

export class Gantt {
  constructor() {
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.rows = h("div", { class: "gantt-rows", role: "list" });
    this.total = h("p", { class: "meta" });
    this.id = h("p", { class: "under mono" });
    this.element = h(
      "section",
      { class: "gantt panel", "aria-label": "Timeline", hidden: true },
      h("div", { class: "heading" }, this.id, this.total),
      h("p", { class: "legend", "aria-hidden": "true" }, mark("waits", "waits in its lane"), mark("runs", "runs"), mark("answers", "answers"), mark("lost", "worker lost")),
      this.rows,
      this.axis,
    );
  }

  set({ id, now, jobs }) {
    const began = Math.min(...jobs.map((job) => job.events[0].at));
    const ended = Math.max(...jobs.map((job) => (over(job) ? job.events.at(-1).at : now)));
    const length = Math.max(ended - began, 0.001);
    this.element.hidden = false;
    text(this.id, id);
    text(this.total, `${over(jobs[0]) ? `${jobs[0].state === "result" ? "done" : jobs[0].state} after` : "running for"} ${seconds(length)}`);
    this.rows.replaceChildren(...jobs.map((job) => rowOf(job, began, length, now)));
    this.#scale(length);
  }

  #scale(length) {
    const power = 10 ** Math.floor(Math.log10(length / 4));
    const step = power * (STEPS.find((one) => length / (one * power) <= 5) ?? 10);
    const marks = [];
    for (let at = 0; at <= length * 0.98; at += step) {
      const label = h("span", {}, at ? seconds(at) : "0");
      label.style.left = `${(100 * at) / length}%`;
      marks.push(label);
    }
    this.axis.replaceChildren(...marks);
  }
}

const over = (job) => job.events.at(-1).what === "ended";

function mark(name, words) {
  return h("span", {}, h("i", { class: `segment ${name}` }), words);
}

function rowOf(job, began, length, now) {
  const parts = segments(job, now);
  const bars = parts.filter(({ what, from, to }) => what !== "waits" || to - from > length * SEEN).map(({ what, from, to }) => {
    const bar = h("span", { class: `segment ${what}` });
    bar.style.left = `${(100 * (from - began)) / length}%`;
    bar.style.width = `${Math.max(100 * SEEN, (100 * (to - from)) / length)}%`;
    return bar;
  });
  const by = job.events.findLast((event) => event.worker)?.worker ?? "";
  const who = by ? (SERVICES[by.split("-")[0]] ?? by) : job.state;
  const size = job.kind === "request" ? null : job.tokens ? many(job.tokens, "token") : many(job.items, "item");
  const told = parts.map(({ what, from, to }) => `${what} ${seconds(Math.max(0, to - from))}`).join(", ");
  const failed = job.state !== "result" && over(job) ? h("span", { class: "under bad" }, job.error?.message ?? job.state) : null;
  return h(
    "div",
    { class: "gantt-row", role: "listitem", "data-stage": job.stage },
    h("div", { class: "gantt-name" }, h("strong", {}, stageName(job)), h("span", { class: "under" }, [who, size, job.attempts > 1 ? many(job.attempts, "attempt") : null].filter(Boolean).join(" · ")), failed),
    h("div", { class: "gantt-track", role: "img", "aria-label": told }, bars),
  );
}

// Cuts the time of a job into parts: waiting until leased, running until the first event, answering until the end.
function segments(job, now) {
  const kinds = { admitted: "waits", leased: "runs", lost: "waits", returned: "waits", first: job.kind === "request" ? "runs" : "answers" };
  const found = [];
  job.events.forEach((event, i) => {
    if (event.what === "ended") return;
    const next = job.events[i + 1];
    const what = next?.what === "lost" ? "lost" : kinds[event.what];
    found.push({ what, from: event.at, to: next ? next.at : now });
  });
  return found;
}
