// The jobs of one request across services, and the times of their events.

import { ask, segment } from "./api.js";
import { h, table, text } from "./dom.js";
import { ago } from "./format.js";
import { Gantt, stageName } from "./gantt.js";
import { recent, timelineOf } from "./recent.js";
import { StageChart } from "./stages.js";

const AGAIN_MS = 700;
const WHAT = {
  admitted: "admitted",
  leased: "leased",
  lost: "lost: its worker died",
  returned: "handed back",
  first: "first event logged",
  ended: "ended",
};

export class Timeline {
  title = "Timeline";

  constructor() {
    this.input = h("input", { id: "timeline-id", placeholder: "x-request-id of an answer, or an Idempotency-Key", autocomplete: "off", spellcheck: "false" });
    this.failed = h("p", { class: "error", role: "alert", hidden: true });
    this.stages = new StageChart();
    this.gantt = new Gantt();
    const { element, body, cells } = table("Events", ["After", "Job", "Event", "Worker or lane"]);
    this.events = body;
    this.cells = cells;
    this.tabled = h("div", { class: "tabled", hidden: true }, element);
    this.recent = h("ul", { class: "recent" });
    this.before = h("section", { class: "panel", "aria-label": "Recent requests" }, h("div", { class: "heading" }, h("h2", {}, "Recent requests"), h("p", {}, "Requests sent from this page, newest first.")), this.recent);
    this.element = h(
      "div",
      { class: "view timeline" },
      h("h1", { class: "unseen" }, "Timeline"),
      h("form", { class: "ask", onsubmit: (event) => this.#go(event) }, h("label", { for: "timeline-id", class: "unseen" }, "Request id"), this.input, h("button", { class: "primary", type: "submit" }, "Show")),
      this.failed,
      this.stages.element,
      this.gantt.element,
      this.tabled,
      this.before,
    );
    this.timer = 0;
  }

  show(id) {
    clearTimeout(this.timer);
    this.id = id;
    this.input.value = id;
    this.#recent();
    if (id) return this.#look();
    this.#clear();
    this.#complain("");
    this.input.focus({ preventScroll: true });
    return undefined;
  }

  hide() {
    clearTimeout(this.timer);
  }

  #go(event) {
    event.preventDefault();
    const id = this.input.value.trim();
    if (!id) return;
    if (location.hash === timelineOf(id)) this.show(id);
    else location.hash = timelineOf(id);
  }

  #recent() {
    const items = recent().map(({ id, what, at }) => h("li", {}, h("a", { href: timelineOf(id) }, what), h("span", { class: "under" }, ago(at))));
    this.recent.replaceChildren(...(items.length ? items : [h("li", { class: "quiet" }, "No request yet. A chat or a search sent from this page appears in this list.")]));
  }

  async #look() {
    const id = this.id;
    try {
      const { body } = await ask(`/v1/requests/${segment(id)}/timeline`);
      if (id !== this.id) return;
      this.#complain("");
      this.stages.set(body.stages ?? []);
      this.gantt.set(body);
      this.#tell(body.jobs);
      const runs = body.jobs.some((job) => ["queued", "running"].includes(job.state));
      if (runs) this.timer = setTimeout(() => this.#look(), AGAIN_MS);
    } catch (error) {
      if (id !== this.id) return;
      this.#clear();
      this.#complain(error.message);
    }
  }

  #clear() {
    this.stages.element.hidden = this.gantt.element.hidden = this.tabled.hidden = true;
  }

  #tell(jobs) {
    const began = Math.min(...jobs.map((job) => job.events[0].at));
    const events = jobs.flatMap((job) => job.events.map((event) => ({ ...event, job })));
    events.sort((a, b) => a.at - b.at);
    this.events.replaceChildren(
      ...events.map(({ at, what, worker, job }) => {
        const { row, made } = this.cells();
        const ended = what === "ended" ? `${WHAT.ended}: ${job.error?.message ?? job.state}` : WHAT[what];
        const first = what === "first" && job.kind === "chat" ? "first token" : ended;
        [`${Math.round((at - began) * 1000)} ms`, stageName(job), first, worker ?? (what === "admitted" ? `${job.lane === "own" ? "the router's own" : job.lane} lane` : "")].forEach((words, i) => text(made[i], words));
        made[0].classList.add("number");
        return row;
      }),
    );
    this.tabled.hidden = false;
  }

  #complain(words) {
    this.failed.hidden = !words;
    text(this.failed, words);
  }
}
