// The latest step of each worker of which a part was attended on the host: what each side computed when.

import { h, Rows, text } from "./dom.js";
import { many, percent, seconds } from "./format.js";

const WHY = {
  "device only": "on the device only",
  "host beside device": "one batch, the host beside the device",
  "two batches": "two batches",
  "in place": "one batch, the device waits for pages attended on the host",
  overdue: "sequences that wait no longer",
  fixed: "a mode that does not choose",
};
// What became of prompts' pages that only the host had, since the start.
const USES = { attend: "attended in place", fetch: "fetched to the device", recompute: "computed anew", split: "attended over both tiers" };
const LINEAR = ["before", "after"];
const THIN = 0.0008; // of the whole: a shorter stage could not be seen
const SIDES = [
  ["device", "Device"],
  ["host", "Host"],
];

export class Steps {
  constructor() {
    const list = h("div");
    this.rows = new Rows(list, () => new Step());
    this.element = h("div", {}, h("p", { class: "legend", "aria-hidden": "true" }, mark("batch-0", "batch 0"), mark("batch-1", "batch 1"), mark("batch-0 attends", "attention")), list);
  }

  // Returns whether there is a step to show.
  set({ workers }) {
    const told = workers.filter((worker) => worker.step);
    this.rows.set(told, (worker) => worker.name);
    return told.length > 0;
  }
}

class Step {
  constructor() {
    this.name = h("strong");
    this.words = h("p", { class: "under" });
    this.tracks = SIDES.map(([side, name]) => {
      const track = h("div", { class: "gantt-track", role: "img" });
      const idle = h("span", { class: "under" });
      return { side, track, idle, element: h("div", { class: "gantt-row", "data-side": side }, h("div", { class: "gantt-name" }, h("strong", {}, name), idle), track) };
    });
    this.element = h("div", { class: "staged-step" }, h("p", {}, this.name), this.words, ...this.tracks.map(({ element }) => element));
    this.drawn = 0;
  }

  set({ name, model, step }) {
    if (step.at === this.drawn) return;
    this.drawn = step.at;
    this.element.dataset.worker = name;
    text(this.name, `${model ?? name}: ${reasonOf(step)}`);
    text(this.words, wordsOf(step));
    const length = Math.max(...step.stages.map(([, , , , end]) => end), 1e-9);
    for (const { side, track, idle } of this.tracks) {
      const stages = step.stages.filter(([stage]) => (stage === "host") === (side === "host"));
      text(idle, `idle ${seconds(step.idle_s[side])}`);
      track.setAttribute("aria-label", `${side}: ${many(stages.length, "stage")} of the first ${many(1 + Math.max(...step.stages.map(([, , layer]) => layer), 0), "layer")}, idle ${seconds(step.idle_s[side])}`);
      track.replaceChildren(...stages.map((stage) => bar(stage, length)));
    }
  }
}

function reasonOf({ why, resumed }) {
  const histories = Object.entries(resumed).map(([use, count]) => `${count} ${USES[use] ?? use}`);
  return `${WHY[why] ?? why}${histories.length ? `; pages that only the host had, since the start: ${histories.join(", ")}` : ""}`;
}

function wordsOf({ decoded, on_host: onHost, host_share: share, predicted_s: predicted, measured_s: measured, slack_s: slack, layers }) {
  const rows = `${many(decoded, "decoding row")}, ${onHost} attended on the host (${percent(share)} since the start)`;
  const halves = `the host is to be done ${signed(slack.long)} and ${signed(slack.short)} before the device in the two halves of a layer`;
  return `${rows}; ${many(layers, "layer")} predicted to take ${seconds(predicted)}, took ${seconds(measured)}; ${halves}.`;
}

const signed = (value) => (value < 0 ? `−${seconds(-value)}` : seconds(value));

function bar([stage, part, layer, begin, end], length) {
  const made = h("span", { class: `segment batch-${part}${LINEAR.includes(stage) ? "" : " attends"}` });
  made.title = `layer ${layer}, batch ${part}, ${LINEAR.includes(stage) ? `linear work ${stage} attention` : stage === "staged" ? "attention, pages brought from the host" : "attention"}: ${seconds(end - begin)}`;
  made.style.left = `${(100 * begin) / length}%`;
  made.style.width = `${Math.max(100 * THIN, (100 * (end - begin)) / length)}%`;
  return made;
}

function mark(name, words) {
  return h("span", {}, h("i", { class: `segment ${name}` }), words);
}
