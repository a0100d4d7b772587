// The last tuning of a collection: how far it is, its plan, and the settings that no other one beats.

import { h, svg, text } from "./dom.js";
import { bytes, count, many, seconds } from "./format.js";
import { section } from "./mesh.js";
import { label } from "./plot.js";

const HEIGHT = 220;
const LEFT = 62;
const RIGHT = 14;
const TOP = 12;
const BOTTOM = 36;
const DECADE = 10;
const STATES = {
  asked: "asked for; no process has taken it up yet",
  exploring: "exploring, beside the traffic",
  building: "building by the plan; the old index answers until the new one is proved",
  done: "done",
  cancelled: "cancelled; the index that there was answers",
  failed: "failed; the index that there was answers",
};

export class Tuning {
  constructor() {
    this.state = h("p", { class: "under" });
    this.plan = h("p");
    this.plot = svg("svg", { class: "plot tuning-plot", role: "img", height: HEIGHT });
    this.notes = h("ul", { class: "hint" });
    this.element = section("Tuning", "What `spillway tune` explored: recall against predicted searches a second, each point a setting that no other one beats.", this.state, this.plot, this.plan, this.notes);
    this.element.hidden = true;
    this.drawn = "";
    new ResizeObserver(() => this.#draw()).observe(this.plot);
  }

  // `tuning` is what the route tells, null without one.
  set(tuning) {
    this.element.hidden = !tuning;
    this.tuning = tuning;
    if (!tuning) return;
    const step = tuning.state === "exploring" && tuning.steps.length ? `: ${tuning.steps.at(-1)}` : "";
    const why = tuning.why ? `: ${tuning.why}` : "";
    text(this.state, `Goal: recall ${tuning.goal.recall}${bounds(tuning.goal)}. ${STATES[tuning.state] ?? tuning.state}${step}${why}.`);
    text(this.plan, planWords(tuning));
    this.notes.replaceChildren(...tuning.notes.map((note) => h("li", {}, note)));
    this.#draw();
  }

  #draw() {
    const width = this.plot.clientWidth;
    const front = this.tuning?.front ?? [];
    this.plot.toggleAttribute("hidden", !front.length);
    const now = JSON.stringify([width, front]);
    if (!width || !front.length || now === this.drawn) return;
    this.drawn = now;
    const low = Math.min(...front.map(({ recall }) => recall), 0.9);
    const decades = front.map(({ qps }) => Math.log10(qps));
    const [least, most] = [Math.floor(Math.min(...decades)), Math.ceil(Math.max(...decades)) || 1];
    const x = (recall) => LEFT + ((width - LEFT - RIGHT) * (recall - low)) / (1 - low);
    const y = (qps) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (Math.log10(qps) - least)) / Math.max(most - least, 1);
    const lines = Array.from({ length: Math.max(most - least, 1) + 1 }, (_, i) => DECADE ** (least + i));
    const marks = [low, (low + 1) / 2, 1];
    const goal = this.tuning.goal.recall;
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.setAttribute("aria-label", `${many(front.length, "setting")}: recall against searches a second`);
    this.plot.replaceChildren(
      ...lines.map((value) => svg("g", {}, svg("path", { class: "plot-grid", d: `M${LEFT} ${y(value)}H${width - RIGHT}` }), label(`${count(value)}/s`, LEFT - 8, y(value) + 4, "end"))),
      ...marks.map((value) => label(value.toFixed(2), x(value), HEIGHT - BOTTOM + 16, "middle")),
      label("recall", width - RIGHT, HEIGHT - 4, "end"),
      ...(goal >= low ? [svg("path", { class: "plot-objective", d: `M${x(goal)} ${TOP}V${HEIGHT - BOTTOM}` })] : []),
      ...front.map((each) => this.#point(each, x(each.recall), y(each.qps))),
    );
  }

  #point(each, x, y) {
    const last = JSON.stringify(each) === JSON.stringify(this.tuning.chosen);
    const words = `${settingWords(each.setting)}: recall ${each.recall.toFixed(3)}, ${count(each.qps)} searches/s, p99 ${seconds(each.p99_s)}, ${bytes(each.bytes)}`;
    return svg("circle", { class: `plot-point ${each.setting.kind}${last ? " last" : ""}`, cx: x, cy: y, r: last ? 6 : 4 }, svg("title", {}, words));
  }
}

function bounds({ p99_s: p99, memory_bytes: memory }) {
  return `${p99 ? `, p99 ${seconds(p99)}` : ""}${memory ? `, ${bytes(memory)} of memory` : ""}`;
}

function settingWords({ kind, lists, links, effort, depth, code_bits: bits, rotate }) {
  if (kind === "graph") return `graph, M ${links}, ef ${effort}`;
  if (kind !== "ivfpq") return "exact";
  return `ivfpq, nlist ${lists}, nprobe ${effort}, depth ${depth}, ${bits} bits${rotate ? ", OPQ" : ""}`;
}

function planWords({ chosen, measured, explored }) {
  if (!chosen) return "";
  const found = measured ? ` Measured: recall ${measured.recall.toFixed(3)} by ${many(measured.queries, "query")} that tuning had not seen, ${count(measured.qps)} searches/s.` : "";
  return `Of ${many(explored, "setting")}: ${settingWords(chosen.setting)}, predicted ${count(chosen.qps)} searches/s at recall ${chosen.recall.toFixed(3)}.${found}`;
}
