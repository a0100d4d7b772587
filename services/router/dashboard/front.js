// The front that the mesh's plan was chosen from, first token against rate: the planned point, and where the mesh runs now.

import { h, Rows, svg, table, text } from "./dom.js";
import { many, seconds } from "./format.js";
import { label } from "./plot.js";

const SETTING = "SPILLWAY_PLANNED_FRONT=";
export const ABOUT = "What the planner could choose from: no other schedule has an earlier first token and more requests a second for its chips.";
const HEIGHT = 260;
const LEFT = 62;
const RIGHT = 18;
const TOP = 18;
const BOTTOM = 40;
const ROOM = 1.6; // of a logarithmic axis, beyond the furthest points: so that a mark lies within any
const STEPS = [1, 2, 5];
const DECADE = 10;
const DIGITS = 3;

export class Front {
  constructor() {
    this.plot = svg("svg", { class: "plot front-plot", role: "img", height: HEIGHT });
    this.planned = h("p", { class: "planned" });
    this.now = h("p", { class: "now" });
    this.drift = h("p", { class: "drift" });
    this.listed = h("div", { class: "tabled" });
    this.details = h("details", {}, h("summary", {}, "All schedules of the front"), this.listed);
    this.element = h("div", { class: "front" }, this.plot, this.planned, this.now, this.drift, this.details);
    this.drawn = "";
    this.unit = "";
    new ResizeObserver(() => this.#draw()).observe(this.plot);
  }

  // Returns whether the mesh has a plan whose point is known.
  set(mesh) {
    const plan = planOf(mesh);
    if (!plan) return false;
    const now = nowOf(mesh, plan);
    this.shown = { ...plan, now };
    text(this.planned, `Planned: ${pointWords(plan.planned, plan.unit)}.`);
    text(this.now, nowWords(now, mesh, plan));
    const drifted = mesh.planned_costs.filter((cost) => cost.drifted);
    text(this.drift, drifted.map((cost) => `${cost.kind}: a batch takes ${seconds(cost.live_s)}, planned ${seconds(cost.seconds)}.`).join(" "));
    this.drift.hidden = !drifted.length;
    this.#list(plan);
    this.#draw();
    return true;
  }

  #list({ unit, planned, front }) {
    if (unit !== this.unit) {
      this.unit = unit;
      const { element, body, cells } = table("Schedules of the front", ["First token", `Requests/s a ${unit}`, "Requests/s", "Between tokens", `${unit}s`, "Placement"]);
      this.listed.replaceChildren(element);
      this.rows = new Rows(body, () => new Schedule(cells()));
    }
    this.details.hidden = !front.length;
    this.rows.set(front.map((each) => ({ ...each, planned: same(each, planned) })), (each) => `${each.ttft_s} ${each.qps} ${each.placement}`);
  }

  #draw() {
    const width = this.plot.clientWidth;
    const drawn = JSON.stringify([width, this.shown]);
    if (!width || !this.shown || drawn === this.drawn) return;
    this.drawn = drawn;
    const { unit, planned, front, now } = this.shown;
    const marks = [...front, planned, ...(now ? [now] : [])];
    const x = scale(marks.map((each) => each.ttft_s), LEFT, width - RIGHT);
    const y = scale(marks.map(rateOf), HEIGHT - BOTTOM, TOP);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.setAttribute("aria-label", `${many(front.length, "schedule")}: time to the first token against requests/s a ${unit}. Planned: ${pointWords(planned, unit)}.`);
    this.plot.replaceChildren(
      ...y.ticks().map((value) => svg("g", {}, svg("path", { class: "plot-grid", d: `M${LEFT} ${y.at(value)}H${width - RIGHT}` }), label(number(value), LEFT - 8, y.at(value) + 4, "end"))),
      ...x.ticks().map((value) => label(seconds(value), x.at(value), HEIGHT - BOTTOM + 16, "middle")),
      label("time to the first token", width - RIGHT, HEIGHT - 6, "end"),
      label(`requests/s a ${unit}`, LEFT + 4, TOP - 6, "start"),
      ...(front.length ? [svg("path", { class: "front-line", d: steps(front, x, y) })] : []),
      ...front.map((each) => dot(each, unit, x, y, "plot-point", 4)),
      ...named(planned, unit, x, y, width, "planned"),
      ...(now ? named(now, unit, x, y, width, "now") : []),
    );
  }
}

class Schedule {
  constructor({ row, made }) {
    this.element = row;
    this.cells = made;
  }

  set({ ttft_s: first, qps, chips, tpot_s: between, placement, planned }) {
    this.element.classList.toggle("is-planned", planned);
    const words = [seconds(first), number(qps / chips), number(qps), seconds(between), chips, planned ? `${placement} (planned)` : placement];
    words.forEach((each, i) => text(this.cells[i], each));
  }
}

// What a router that a plan started was told: unit;point,point…, the plan's own point first.
function planOf({ processes }) {
  const told = processes.flatMap(({ service, settings }) => (service === "router" ? settings.filter((each) => each.startsWith(SETTING)) : []));
  if (!told.length) return null;
  const [unit, points] = told[0].slice(SETTING.length).split(";");
  const [planned, ...front] = points.split(",").map(pointOf);
  return { unit, planned, front };
}

function pointOf(words) {
  const [first, qps, chips, between, ...placement] = words.split(":");
  return { ttft_s: Number(first), qps: Number(qps), chips: Number(chips), tpot_s: Number(between), placement: placement.join(":") };
}

// What this router's answers of the last minutes give, on the plan's chips; null while nothing was answered.
function nowOf({ window }, { planned }) {
  const [most] = [...window.first_token].sort((a, b) => b.count - a.count);
  if (!most?.p50_s) return null;
  const answers = window.first_token.reduce((sum, { count: times }) => sum + times, 0);
  const between = window.per_token.find(({ model }) => model === most.model)?.p50_s ?? 0;
  return { ttft_s: most.p50_s, qps: answers / window.seconds, chips: planned.chips, tpot_s: between, placement: "" };
}

function pointWords({ ttft_s: first, qps, chips, tpot_s: between, placement }, unit) {
  const parts = [`first token after ${seconds(first)}`, `${number(qps)} requests/s on ${many(chips, unit)}`];
  if (between) parts.push(`${seconds(between)} between tokens`);
  return placement ? `${parts.join(", ")}; ${placement}` : parts.join(", ");
}

function nowWords(now, { window, processes }, { unit }) {
  if (!now) return "Now: no answer yet.";
  const routers = processes.filter(({ service }) => service === "router").length;
  const own = routers > 1 ? `, of this router, one of ${routers}` : "";
  return `Now: ${pointWords(now, unit)} (medians of the last ${seconds(Math.max(1, Math.round(window.seconds)))}${own}). The rate is what was asked for, at most what can be answered.`;
}

const rateOf = ({ qps, chips }) => qps / chips;
const same = (a, b) => a.ttft_s === b.ttft_s && a.qps === b.qps && a.chips === b.chips;
const number = (value) => String(Number(value.toPrecision(DIGITS)));

// A logarithmic axis that holds all values, from one place of the plot to another.
function scale(values, start, end) {
  const [low, high] = [Math.min(...values) / ROOM, Math.max(...values) * ROOM];
  const decades = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, i) => Math.floor(Math.log10(low)) + i);
  return {
    at: (value) => Number((start + ((end - start) * Math.log(value / low)) / Math.log(high / low)).toFixed(1)),
    ticks: () => decades.flatMap((decade) => STEPS.map((step) => step * DECADE ** decade)).filter((value) => value >= low && value <= high),
  };
}

// A later first token allows what an earlier one gives, until the next schedule.
function steps([start, ...rest], x, y) {
  return rest.reduce((path, each) => `${path}H${x.at(each.ttft_s)}V${y.at(rateOf(each))}`, `M${x.at(start.ttft_s)} ${y.at(rateOf(start))}`);
}

function dot(point, unit, x, y, name, radius) {
  return svg("circle", { class: name, cx: x.at(point.ttft_s), cy: y.at(rateOf(point)), r: radius }, svg("title", {}, pointWords(point, unit)));
}

function named(point, unit, x, y, width, name) {
  const left = x.at(point.ttft_s) > width / 2;
  const words = label(name, x.at(point.ttft_s) + (left ? -10 : 10), y.at(rateOf(point)) - 8, left ? "end" : "start");
  words.setAttribute("class", `front-${name}`);
  return [dot(point, unit, x, y, `plot-point last front-${name}`, 6), words];
}
