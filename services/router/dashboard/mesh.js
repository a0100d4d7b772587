// The mesh at a glance: figures, lanes, workers, its plan, latencies, refusals, and overflow.

import { ABOUT, Front } from "./front.js";
import { Lanes } from "./lanes.js";
import { Overflow } from "./overflow.js";
import { Steps } from "./steps.js";
import { Traffic } from "./traffic.js";
import { Workers } from "./workers.js";
import { h, text } from "./dom.js";
import { count, seconds } from "./format.js";

export class Mesh {
  title = "Mesh";

  constructor() {
    this.lanes = new Lanes();
    this.overflow = new Overflow();
    this.workers = new Workers();
    this.steps = new Steps();
    this.staged = section("Attention on the host", "The latest step in stages of each worker: while one batch is attended on the host, the device computes the other.", this.steps.element);
    this.staged.hidden = true;
    this.front = new Front();
    this.plan = section("Plan", ABOUT, this.front.element);
    this.plan.hidden = true;
    this.traffic = new Traffic();
    this.figures = ["Workers", "Answered", "Refused", "First token"].map((name) => figure(name));
    this.note = h("p", { class: "note", role: "status", hidden: true });
    this.element = h(
      "div",
      { class: "view mesh unknown" },
      h("h1", { class: "unseen" }, "Mesh"),
      this.note,
      h("dl", { class: "figures" }, this.figures.map(({ element }) => element)),
      section("Lanes", "Work queued and running in each lane, against its depth: the most it can hold and still finish in time.", this.lanes.element),
      section("Workers", "Predicted seconds of a batch: β + α for each item or token.", this.workers.element),
      this.staged,
      this.plan,
      this.traffic.element,
      section("Accelerator and overflow", "Jobs that the accelerator could not finish in time spill to the CPU lane.", this.overflow.element),
    );
  }

  set(mesh) {
    this.note.hidden = true;
    this.element.classList.remove("stale", "unknown");
    this.lanes.set(mesh);
    this.overflow.set(mesh);
    this.workers.set(mesh);
    this.staged.hidden = !this.steps.set(mesh);
    this.plan.hidden = !this.front.set(mesh);
    this.traffic.set(mesh);
    const ready = mesh.workers.filter((worker) => worker.state === "ready").length;
    const lost = mesh.workers.filter((worker) => worker.state === "lost").length;
    const { window } = mesh;
    const answered = window.routes.reduce((sum, route) => sum + route.count - route.refused, 0);
    const refused = window.refused.reduce((sum, { count: n }) => sum + n, 0);
    const times = [...window.first_token].sort((a, b) => b.count - a.count)[0];
    const lately = `in ${seconds(Math.round(window.seconds))}`;
    const [workers, answers, refusals, first] = this.figures;
    workers.set(`${ready} ready`, lost ? `${lost} lost` : "none lost", lost > 0);
    answers.set(count(answered), lately);
    refusals.set(count(refused), refused ? "reasons below" : lately, refused > 0);
    first.set(times ? seconds(times.p95_s) : "–", times ? "95th percentile" : "no answer yet");
  }

  lost(error) {
    this.note.hidden = false;
    this.element.classList.add("stale");
    this.element.classList.toggle("unknown", error.locked || this.element.classList.contains("unknown"));
    const old = this.element.classList.contains("unknown") ? "" : "The figures on this page are old; ";
    text(this.note, error.locked ? error.message : `${sentence(error.message)} ${old ? `${old}the` : "The"} page keeps trying.`);
  }
}

const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}.`;

export function figure(name) {
  const value = h("dd", { class: "value" });
  const more = h("dd", { class: "more" });
  const element = h("div", { class: "figure" }, h("dt", {}, name), value, more);
  return {
    element,
    set(words, rest, alarming = false) {
      text(value, words);
      text(more, rest);
      element.classList.toggle("alarming", alarming);
    },
  };
}

export function section(title, about, ...children) {
  return h("section", { class: "panel", "aria-label": title }, h("div", { class: "heading" }, h("h2", {}, title), h("p", {}, about)), ...children);
}
