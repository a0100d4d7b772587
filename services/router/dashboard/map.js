// A map on a canvas: points of a sample, those of a search's hits lit up; moved and zoomed by mouse, touch and keys.

import { h } from "./dom.js";

const HEIGHT = 460;
const MARGIN = 28;
const NEAR = 10; // pixels within which a point is meant
const MOST_ZOOM = 400; // times the whole map
const STEP = 1.5;
const PAN = 60;
const POINT = 2.6;
const HIT = 9;
const KEYS = { ArrowLeft: [PAN, 0], ArrowRight: [-PAN, 0], ArrowUp: [0, PAN], ArrowDown: [0, -PAN] };

export class PointMap {
  // `chosen` is called with the point that was clicked.
  constructor(chosen) {
    this.canvas = h("canvas", { role: "img" });
    this.tip = h("div", { class: "map-tip", hidden: true });
    this.area = h("div", { class: "map-area", role: "group", tabindex: "0", "aria-label": "Map. Arrow keys move it, plus and minus zoom, 0 shows all of it." }, this.canvas, this.tip);
    this.element = h(
      "div",
      { class: "map" },
      this.area,
      h(
        "div",
        { class: "map-zoom row" },
        h("button", { type: "button", "aria-label": "Zoom in", onclick: () => this.#zoom(STEP) }, "+"),
        h("button", { type: "button", "aria-label": "Zoom out", onclick: () => this.#zoom(1 / STEP) }, "−"),
        h("button", { type: "button", onclick: () => this.whole() }, "Whole map"),
      ),
    );
    this.chosen = chosen;
    this.points = [];
    this.hits = [];
    this.marked = null;
    this.pointers = new Map();
    new ResizeObserver(() => this.#resized()).observe(this.area);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    this.area.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.#down(event));
    this.canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, (event) => this.#up(event));
    this.canvas.addEventListener("pointerleave", () => this.#hover(null));
    this.whole();
  }

  // Points of {id, chunk, x, y, title}; `words` say what the picture shows. `anew`: the view begins with all of them.
  set(points, words, anew) {
    this.points = points;
    this.canvas.setAttribute("aria-label", words);
    this.area.dataset.points = String(points.length);
    this.#hover(null);
    if (anew) this.whole();
    else this.#draw();
  }

  // Lights the points of hits, best first; the others step back. A hit that lies outside of the view widens it.
  light(hits) {
    this.hits = hits;
    this.marked = null;
    this.area.dataset.lit = String(hits.length);
    if (hits.some((hit) => !this.#inside(this.#at(hit)))) this.whole();
    else this.#draw();
  }

  // Marks one lit point, null for none.
  mark(hit) {
    this.marked = hit;
    this.#draw();
  }

  // Shows everything.
  whole() {
    const all = [...this.points, ...this.hits];
    const xs = all.map((point) => point.x);
    const ys = all.map((point) => point.y);
    const [left, right] = [min(xs), max(xs)];
    const [bottom, top] = [min(ys), max(ys)];
    this.home = { x: (left + right) / 2, y: (bottom + top) / 2, width: right - left, height: top - bottom };
    this.zoom = 1;
    this.middle = { x: this.home.x, y: this.home.y };
    this.#draw();
  }

  // Moves the view so that a point is in its middle.
  centre(point) {
    this.middle = { x: point.x, y: point.y };
    this.mark(point);
  }

  // Pixels for one unit of the map.
  get #scale() {
    const { width, height } = this.home;
    const [across, down] = [this.#width - 2 * MARGIN, HEIGHT - 2 * MARGIN];
    const fitting = Math.min(width > 0 ? across / width : Infinity, height > 0 ? down / height : Infinity);
    return this.zoom * (Number.isFinite(fitting) && fitting > 0 ? fitting : 1);
  }

  get #width() {
    return Math.max(this.area.clientWidth, 1);
  }

  #at({ x, y }) {
    return [this.#width / 2 + (x - this.middle.x) * this.#scale, HEIGHT / 2 - (y - this.middle.y) * this.#scale];
  }

  #inside([x, y]) {
    return x >= 0 && x <= this.#width && y >= 0 && y <= HEIGHT;
  }

  #resized() {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.#width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    this.#draw();
  }

  #draw() {
    this.area.dataset.zoom = this.zoom.toFixed(2);
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#paint();
    });
  }

  #paint() {
    const to = this.canvas.getContext("2d");
    const style = getComputedStyle(this.area);
    const colour = (name) => style.getPropertyValue(name).trim();
    const ratio = this.canvas.width / this.#width;
    to.setTransform(ratio, 0, 0, ratio, 0, 0);
    to.clearRect(0, 0, this.#width, HEIGHT);
    to.fillStyle = colour(this.hits.length ? "--soft" : "--accent");
    to.globalAlpha = this.hits.length ? 0.28 : 0.5;
    for (const point of this.points) {
      const place = this.#at(point);
      if (this.#inside(place)) circle(to, place, POINT);
    }
    to.globalAlpha = 1;
    to.textAlign = "center";
    to.textBaseline = "middle";
    to.font = `600 11px ${style.fontFamily}`;
    [...this.hits].reverse().forEach((hit) => {
      const [x, y] = this.#at(hit);
      to.fillStyle = colour("--accent");
      circle(to, [x, y], hit === this.marked ? HIT + 3 : HIT);
      to.lineWidth = 2;
      to.strokeStyle = colour(hit === this.marked ? "--ink" : "--card");
      to.stroke();
      to.fillStyle = colour("--accent-ink");
      to.fillText(String(hit.rank), x, y + 0.5);
    });
    if (this.under && !this.hits.includes(this.under)) {
      to.fillStyle = colour("--ink");
      circle(to, this.#at(this.under), POINT + 2);
    }
  }

  // -- what people do

  #zoom(factor, x = this.#width / 2, y = HEIGHT / 2) {
    const before = this.#scale;
    this.zoom = Math.min(MOST_ZOOM, Math.max(0.5, this.zoom * factor));
    const shift = 1 / before - 1 / this.#scale;
    this.middle = { x: this.middle.x + (x - this.#width / 2) * shift, y: this.middle.y - (y - HEIGHT / 2) * shift };
    this.#draw();
  }

  #pan(x, y) {
    this.middle = { x: this.middle.x - x / this.#scale, y: this.middle.y + y / this.#scale };
    this.#draw();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (KEYS[event.key]) this.#pan(...KEYS[event.key]);
    else if (event.key === "+" || event.key === "=") this.#zoom(STEP);
    else if (event.key === "-") this.#zoom(1 / STEP);
    else if (event.key === "0") this.whole();
    else return;
    event.preventDefault();
  }

  // The page scrolls over a map that nobody has clicked or moved to.
  #wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.area) return;
    event.preventDefault();
    this.#hover(null);
    this.#zoom(STEP ** (-event.deltaY / 120), event.offsetX, event.offsetY);
  }

  #down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.moved = this.pointers.size > 1;
  }

  #move(event) {
    const before = this.pointers.get(event.pointerId);
    const now = [event.offsetX, event.offsetY];
    if (!before) {
      this.#hover(this.#nearest(now), now);
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (others.length) {
      const [other] = others;
      this.#zoom(distance(now, other) / Math.max(distance(before, other), 1), ...other);
    } else if (this.moved || distance(now, before) > 3) {
      this.moved = true;
      this.#hover(null);
      this.#pan(now[0] - before[0], now[1] - before[1]);
    } else return;
    this.pointers.set(event.pointerId, now);
  }

  #up(event) {
    const place = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (event.type !== "pointerup" || !place || this.moved) return;
    const point = this.#nearest(place);
    if (point) this.chosen(point);
  }

  #nearest(place) {
    let found = null;
    let least = NEAR;
    for (const point of [...this.points, ...this.hits]) {
      const away = distance(this.#at(point), place);
      if (away <= least) [found, least] = [point, away];
    }
    return found;
  }

  #hover(point, place) {
    if (point === this.under && !point) return;
    this.under = point;
    this.canvas.classList.toggle("over", Boolean(point));
    this.tip.hidden = !point;
    if (point) {
      this.tip.replaceChildren(h("strong", {}, point.title ?? point.id), point.title ? h("span", { class: "under mono" }, point.id) : "", point.chunk ? h("span", { class: "under" }, `chunk ${point.chunk + 1}`) : "");
      this.tip.style.left = `${Math.min(place[0] + 14, this.#width - this.tip.offsetWidth - 4)}px`;
      this.tip.style.top = `${Math.min(place[1] + 14, HEIGHT - this.tip.offsetHeight - 4)}px`;
    }
    this.#draw();
  }
}

function circle(to, [x, y], radius) {
  to.beginPath();
  to.arc(x, y, radius, 0, 2 * Math.PI);
  to.fill();
}

const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
const min = (values) => values.reduce((a, b) => Math.min(a, b), values[0] ?? 0);
const max = (values) => values.reduce((a, b) => Math.max(a, b), values[0] ?? 0);
