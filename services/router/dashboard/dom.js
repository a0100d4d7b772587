// Elements with plain text only: text of documents, models and people is never markup.

const SVG = "http://www.w3.org/2000/svg";

// An element: properties starting with "on" are listeners, `data-…`, `aria-…` and others are attributes.
export function h(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Sets text only where it changes, so that what is selected stays selected.
export function text(element, words) {
  const value = String(words);
  if (element.textContent !== value) element.textContent = value;
}

// Keeps one child a row, by key: rows stay the same elements while their data changes.
export class Rows {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.known = new Map();
  }

  set(items, keyOf) {
    const seen = new Set();
    let before = null;
    for (const item of items) {
      const key = keyOf(item);
      seen.add(key);
      if (!this.known.has(key)) this.known.set(key, this.make(item));
      const row = this.known.get(key);
      row.set(item);
      const place = before ? before.nextSibling : this.parent.firstChild;
      if (place !== row.element) this.parent.insertBefore(row.element, place);
      before = row.element;
    }
    for (const [key, row] of this.known) {
      if (seen.has(key)) continue;
      row.element.remove();
      this.known.delete(key);
    }
  }
}

// A table whose head names its columns; on narrow screens each cell shows its column's name instead.
export function table(caption, columns) {
  const body = h("tbody");
  const head = columns.map((column) => h("th", { scope: "col" }, column));
  const element = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), body);
  const cells = () => {
    const made = columns.map((column) => h("td", { "data-label": column }));
    return { row: h("tr", {}, made), made };
  };
  return { element, body, cells };
}
