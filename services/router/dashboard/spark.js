// A line of the last minutes: the used share of a lane's depth.

import { svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;
const SPAN_S = 300;

export class Spark {
  constructor(label) {
    this.points = []; // [time in seconds, share]
    this.line = svg("path", { class: "spark-line" });
    this.area = svg("path", { class: "spark-area" });
    this.element = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      this.area,
      this.line,
    );
  }

  // What the router noted before this page was opened; nothing if there are points already.
  seed(shares, everyS, now) {
    if (this.points.length) return;
    shares.forEach((share, i) => this.points.push([now - (shares.length - i) * everyS, share]));
  }

  add(share, now) {
    this.points.push([now, share]);
    while (this.points[0][0] < now - SPAN_S) this.points.shift();
    this.#draw(now);
  }

  #draw(now) {
    const top = Math.max(1, ...this.points.map(([, share]) => share));
    const place = ([at, share]) => [
      (WIDTH * (1 - (now - at) / SPAN_S)).toFixed(1),
      (HEIGHT - 1.5 - (HEIGHT - 3) * (share / top)).toFixed(1),
    ];
    const places = this.points.map(place);
    const line = places.map(([x, y], i) => `${i ? "L" : "M"}${x} ${y}`).join("");
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", `${line}L${WIDTH} ${HEIGHT}L${places[0][0]} ${HEIGHT}Z`);
  }
}
