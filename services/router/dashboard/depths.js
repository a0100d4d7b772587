// Depths in queries of each lane, the tokens computed lately, and the saving by the CPU's share.

import { Rows, h, table, text } from "./dom.js";
import { bound, count, percent } from "./format.js";

const COLUMNS = ["Lane", "Closed loop", "Open loop", "Tokens, last minute"];
const ABOUT =
  "Queries of 75 tokens that end within the objective: all at once (closed loop), or arriving at any time (open loop). " +
  "Saving is CPU / (CPU + accelerator): what spill spares of instances sized by their peak (depths), or by the average (tokens).";

export class Depths {
  constructor() {
    const { element, body, cells } = table("Depths and saving", COLUMNS);
    this.rows = new Rows(body, () => new Row(cells()));
    this.element = h("div", { class: "depths" }, h("div", { class: "tabled" }, element), h("p", { class: "under" }, ABOUT));
  }

  set(lanes) {
    const rows = lanes.map((lane) => {
      const living = lane.devices.filter((worker) => worker.state === "ready");
      const sum = (of) => living.reduce((all, worker) => all + of(worker), 0);
      return {
        name: lane.name,
        class: lane.class,
        values: [sum((worker) => worker.depth.queries), sum((worker) => worker.depth.queries_open), sum((worker) => worker.tokens_lately)],
      };
    });
    const saving = COLUMNS.slice(1).map((_, i) => {
      const all = rows.reduce((sum, { values }) => sum + values[i], 0);
      const cpu = rows.find((row) => row.class === "cpu")?.values[i] ?? 0;
      return all ? percent(cpu / all) : "–";
    });
    const shown = rows.map(({ name, values }) => ({ name, words: [bound(values[0]), bound(values[1]), count(values[2])] }));
    this.rows.set([...shown, { name: "Saving", words: saving }], ({ name }) => name);
  }
}

class Row {
  constructor({ row, made }) {
    this.element = row;
    this.cells = made;
    made.slice(1).forEach((cell) => cell.classList.add("number"));
  }

  set({ name, words }) {
    this.element.classList.toggle("saving", name === "Saving");
    [name, ...words].forEach((value, i) => text(this.cells[i], value));
  }
}
