// Accelerator and overflow: the lanes of each encoder side by side, with measured batches, depths and saving.

import { Depths } from "./depths.js";
import { Device } from "./device.js";
import { REASONS } from "./traffic.js";
import { Rows, h, text } from "./dom.js";
import { NEARLY_FULL } from "./lanes.js";
import { bound, count, many, percent, seconds, share } from "./format.js";

const KINDS = ["embed", "rerank"];
const POLICIES = {
  "windve-tokens": "the first lane predicted to finish a text in time takes it",
  windve: "the accelerator takes texts up to its depth in queries, then the CPU",
  "accelerator-only": "the accelerator alone; no job spills",
  "round-robin": "the lanes take turns",
};
const ALONE = "All workers have one kind of device, so no job spills.";

export class Overflow {
  constructor() {
    this.policy = h("strong");
    this.meaning = h("span");
    this.refused = h("p", { class: "refused-lately" });
    this.none = h("p", { class: "quiet" }, "No encoder is served now.");
    this.list = h("div", { class: "encoders" });
    this.encoders = new Rows(this.list, () => new Encoder());
    this.element = h("div", {}, h("p", { class: "policy" }, this.policy, this.meaning), this.refused, this.none, this.list);
  }

  set({ lanes, workers, router, window }) {
    text(this.policy, router.admission);
    text(this.meaning, `: ${POLICIES[router.admission]}. Delivery to a client takes ${seconds(router.hop_s)}.`);
    const { refused, admitted } = window.minute;
    const reasons = refused.map(({ reason, count: n }) => `${count(n)} as ${REASONS[reason] ?? reason}`);
    text(this.refused, `Refused by this router in the last minute: ${reasons.join(", ") || "none"}.`);
    const names = [...new Set(workers.filter((worker) => KINDS.includes(worker.kind)).map((worker) => worker.family))].sort();
    const encoders = names.map((family) => ({ family, lanes: lanesOf(family, lanes, workers, admitted) }));
    this.encoders.set(encoders, ({ family }) => family);
    this.none.hidden = names.length > 0;
  }
}

// A family's lanes that somebody serves, served or left work in, each with its workers and what it took lately.
function lanesOf(family, lanes, workers, admitted) {
  const own = lanes
    .filter((lane) => KINDS.includes(lane.kind) && lane.lane === `${family}:${lane.class}`)
    .map((lane) => {
      const devices = workers.filter((worker) => worker.family === family && worker.classes.includes(lane.class));
      const taken = admitted.find((one) => one.lane === lane.lane)?.count ?? 0;
      return { ...lane, devices, taken, name: nameOf(lane, devices) };
    })
    .filter((lane) => lane.devices.length || lane.items.used);
  return own.sort((a, b) => (a.class === "cpu") - (b.class === "cpu"));
}

// "Accelerator" and "CPU", as far as that is true: the main lane of a machine without one is served by its CPU.
function nameOf({ class: cls }, devices) {
  if (cls === "cpu") return "CPU";
  return devices.every((worker) => worker.device === "cpu") ? "Main lane" : "Accelerator";
}

class Encoder {
  constructor() {
    this.name = h("h3");
    this.alone = h("p", { class: "quiet" }, ALONE);
    this.pair = h("div", { class: "pair" });
    this.lanes = new Rows(this.pair, () => new Lane());
    this.depths = new Depths();
    this.element = h("section", { class: "encoder" }, this.name, this.alone, this.pair, this.depths.element);
  }

  set({ family, lanes }) {
    const spills = lanes.length > 1;
    this.element.dataset.family = family;
    const [, partition] = family.split("/");
    text(this.name, `${lanes[0]?.model ?? family}${partition === "0" ? "" : `, partition ${partition}`}`);
    this.alone.hidden = spills;
    this.pair.classList.toggle("alone", !spills);
    const all = lanes.reduce((sum, lane) => sum + lane.taken, 0);
    this.lanes.set(lanes.map((lane) => ({ ...lane, all, spills })), (lane) => lane.lane);
    this.depths.element.hidden = !spills;
    if (spills) this.depths.set(lanes);
  }
}

class Lane {
  constructor() {
    this.name = h("h4");
    this.share = h("span", { class: "lane-share" });
    this.fill = h("span", { class: "bar-fill" });
    this.meter = h("div", { class: "bar", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }, this.fill);
    this.spilled = h("dt");
    [this.holds, this.took, this.margin] = ["holds", "took", "margin"].map((name) => h("dd", { class: name }));
    this.live = h(
      "div",
      { class: "live" },
      h("div", { class: "lane-line" }, this.meter, this.share),
      h("dl", { class: "facts" }, h("dt", {}, "Queued and running"), this.holds, this.spilled, this.took, h("dt", {}, "Margin"), this.margin),
    );
    this.plots = h("div", { class: "devices" });
    this.devices = new Rows(this.plots, () => new Device());
    this.element = h("div", { class: "overflow-lane" }, this.name, this.live, this.plots);
  }

  set(lane) {
    const { name, devices, items, tokens, taken, all } = lane;
    const full = Math.max(share(items), share(tokens));
    this.element.dataset.class = lane.class;
    this.live.hidden = !lane.spills;
    text(this.name, name);
    this.meter.setAttribute("aria-label", `Use of ${name}`);
    this.meter.setAttribute("aria-valuenow", String(Math.min(100, Math.round(100 * full))));
    this.fill.style.width = `${Math.min(100, 100 * full)}%`;
    text(this.share, lane.workers ? percent(full) : "no worker");
    this.element.classList.toggle("nearly-full", full >= NEARLY_FULL);
    this.element.classList.toggle("unserved", lane.workers === 0);
    const held = lane.held_s ? `${seconds(lane.held_s)} of work: ` : "";
    text(this.holds, `${held}${count(items.used)} of ${bound(items.depth)} items, ${count(tokens.used)} of ${bound(tokens.depth)} tokens`);
    text(this.spilled, lane.class === "cpu" ? "Spilled, last minute" : "Taken, last minute");
    text(this.took, `${percent(all && taken / all)}: ${count(taken)} of ${many(all, "job")}`);
    text(this.margin, marginWords(devices));
    this.devices.set(devices, (worker) => worker.name);
  }
}

function marginWords(devices) {
  const most = (field) => Math.max(0, ...devices.map((worker) => worker.cost[field]));
  return `${seconds(most("late_s"))}, or ${percent(most("late_share"))} of a prediction if that is less`;
}
