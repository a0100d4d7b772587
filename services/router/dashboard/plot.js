// A plot of measured batches, seconds against tokens, with the fitted line and the objective.

import { svg } from "./dom.js";
import { count, many, seconds } from "./format.js";

const HEIGHT = 208;
const LEFT = 54;
const RIGHT = 12;
const TOP = 14;
const BOTTOM = 36;
const STEPS = [1, 2, 5, 10];
const ROOM = 1.06; // beyond the furthest point
const QUERY_TOKENS = 75; // of an item, until batches tell

export class Plot {
  constructor() {
    this.element = svg("svg", { class: "plot", role: "img", height: HEIGHT });
    this.drawn = "";
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  // `measured` are batches of [items, tokens, seconds], oldest first.
  set({ measured, cost, name }) {
    this.what = { measured, cost, name };
    this.#draw();
  }

  #draw() {
    const width = this.element.clientWidth;
    const now = JSON.stringify([width, this.what]);
    if (!width || now === this.drawn) return;
    this.drawn = now;
    const { measured, cost, name } = this.what;
    const line = lineOf(measured, cost);
    const tokens = ROOM * Math.max(QUERY_TOKENS, ...measured.map((batch) => batch[1]));
    const top = ROOM * Math.max(line(tokens), ...measured.map((batch) => batch[2])) || 1;
    const x = (value) => LEFT + ((width - LEFT - RIGHT) * value) / tokens;
    const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * value) / top;
    this.element.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.element.setAttribute("aria-label", `${many(measured.length, "batch")} on ${name}: seconds against tokens. ${lineWords(cost)}`);
    this.element.replaceChildren(
      ...ticks(top, 4).map((value) => row(value, y(value), width)),
      ...ticks(tokens, width / 90).map((value) => label(count(value), x(value), HEIGHT - BOTTOM + 16, "middle")),
      label("tokens of a batch", width - RIGHT, HEIGHT - 4, "end"),
      ...measured.map((batch, i) => point(batch, x, y, i === measured.length - 1)),
      svg("path", { class: "plot-line", d: `M${x(0)} ${y(line(0))}L${x(tokens)} ${y(line(tokens))}` }),
      ...(cost.slo_s && cost.slo_s <= top ? objective(cost.slo_s, y(cost.slo_s), width) : []),
    );
  }
}

// What the cost says of a batch of so many tokens, with as many of them in an item as in those measured.
function lineOf(measured, { beta_s: beta, alpha_items_s: item, alpha_tokens_s: token }) {
  const sum = (unit) => measured.reduce((all, batch) => all + batch[unit], 0);
  const items = measured.length ? sum(0) / sum(1) : 1 / QUERY_TOKENS;
  return (tokens) => beta + (token + item * items) * tokens;
}

export function lineWords({ beta_s: beta, alpha_items_s: item, alpha_tokens_s: token, r2 }) {
  const parts = [seconds(beta), item && `${seconds(item)} an item`, token && `${seconds(token)} a token`];
  return `${parts.filter(Boolean).join(" + ")}; r²\u00a0${r2.toFixed(3)}`;
}

function ticks(most, number) {
  const rough = most / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((one) => rough <= one * power);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function row(value, y, width) {
  return svg("g", {}, svg("path", { class: "plot-grid", d: `M${LEFT} ${y}H${width - RIGHT}` }), label(value ? seconds(value) : "0", LEFT - 8, y + 4, "end"));
}

export function label(words, x, y, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, words);
}

function point([items, tokens, took], x, y, last) {
  const title = svg("title", {}, `${many(items, "item")}, ${many(tokens, "token")} in ${seconds(took)}`);
  return svg("circle", { class: last ? "plot-point last" : "plot-point", cx: x(tokens).toFixed(1), cy: y(took).toFixed(1), r: last ? 4.5 : 3.5 }, title);
}

function objective(slo, y, width) {
  return [svg("path", { class: "plot-objective", d: `M${LEFT} ${y}H${width - RIGHT}` }), label(`objective ${seconds(slo)}`, width - RIGHT, y - 5, "end")];
}
