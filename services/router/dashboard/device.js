// One device of a lane: the batches it measured, the fitted line, and the latency objective.

import { Plot, lineWords } from "./plot.js";
import { h, text } from "./dom.js";
import { many, seconds } from "./format.js";

export class Device {
  constructor() {
    this.name = h("span", { class: "mono" });
    this.pill = h("span", { class: "pill" });
    this.plot = new Plot();
    this.line = h("p", { class: "fitted" });
    this.about = h("p", { class: "under" });
    this.element = h("figure", { class: "device" }, h("p", { class: "device-name" }, this.name, this.pill), this.plot.element, h("figcaption", {}, this.line, this.about));
  }

  set(worker) {
    const { cost, measured, batches, device, state } = worker;
    const name = `${worker.service} ${worker.name.split("-").slice(1, -1).join("-")} on ${device}`;
    this.element.dataset.worker = worker.name;
    text(this.name, name);
    this.pill.className = `pill ${state}`;
    this.pill.hidden = state === "ready";
    text(this.pill, state);
    this.plot.set({ measured, cost, name });
    text(this.line, `A batch takes ${lineWords(cost)}`);
    text(this.about, `${many(batches, "batch")} so far, ${measured.length} of them seen here; objective ${seconds(cost.slo_s)}`);
  }
}
