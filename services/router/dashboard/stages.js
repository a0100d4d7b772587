// The stages of one request on one axis of time: a row a stage, a bar a run, those that go on at once one above the other.

import { h, text } from "./dom.js";
import { many, seconds } from "./format.js";

const STAGES = {
  rewrite: "Rewrite the question",
  embed: "Embed the text",
  search: "Search",
  rerank: "Rerank",
  quotes: "Embed sentences",
  prompt: "Make the prompt",
  generate: "Generate",
};
const THIN = 0.004; // of the whole: a shorter run could not be seen

export class StageChart {
  constructor() {
    this.words = h("p", { class: "meta" });
    this.rows = h("div", { role: "list" });
    this.element = h("section", { class: "stage-chart panel", "aria-label": "Stages", hidden: true }, h("div", { class: "heading" }, h("h2", {}, "Stages"), this.words), this.rows);
  }

  // `stages` as a request's timeline tells them; nothing is shown of a request that has none.
  set(stages) {
    this.element.hidden = !stages.length;
    if (!stages.length) return;
    const names = [...new Set([...stages].sort((a, b) => a.start_ms - b.start_ms).map(({ name }) => name))];
    const length = Math.max(...stages.map(({ end_ms: end }) => end), 1);
    const shared = overlap(stages);
    text(this.words, `${seconds(length / 1000)}${shared ? `, ${seconds(shared / 1000)} of which several ran at once` : ", one after the other"}`);
    this.rows.replaceChildren(...names.map((name) => rowOf(name, stages.filter((run) => run.name === name), length)));
  }
}

function rowOf(name, runs, length) {
  const took = seconds(runs.reduce((sum, { start_ms: start, end_ms: end }) => sum + end - start, 0) / 1000);
  const bars = runs.map(({ start_ms: start, end_ms: end, nth }) => {
    const bar = h("span", { class: "segment", title: `${nth ? `run ${nth + 1}, ` : ""}${seconds(start / 1000)} to ${seconds(end / 1000)}` });
    bar.style.left = `${(100 * start) / length}%`;
    bar.style.width = `${Math.max(100 * THIN, (100 * (end - start)) / length)}%`;
    return bar;
  });
  const told = `${runs.length > 1 ? `${many(runs.length, "run")}, ` : ""}${took}`;
  return h(
    "div",
    { class: "gantt-row", role: "listitem", "data-run": name },
    h("div", { class: "gantt-name" }, h("strong", {}, STAGES[name] ?? name), h("span", { class: "under" }, told)),
    h("div", { class: "gantt-track", role: "img", "aria-label": `${told}, from ${seconds(runs[0].start_ms / 1000)}` }, bars),
  );
}

// Returns for how many milliseconds at least two runs went on at once.
function overlap(stages) {
  const edges = stages.flatMap(({ start_ms: start, end_ms: end }) => [[start, 1], [end, -1]]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let [total, running, before] = [0, 0, 0];
  for (const [at, change] of edges) {
    if (running > 1) total += at - before;
    running += change;
    before = at;
  }
  return total;
}
