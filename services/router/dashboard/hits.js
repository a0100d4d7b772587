// The hits of a search as a list: title, score, passage.

import { h } from "./dom.js";
import { count, many } from "./format.js";

// A score on its metric's own scale, 0 to 1, so that a poor best hit looks poor: the cosine itself, or how near a distance
// is to none. A dot product has no bounds, so it has no bar.
const SCALES = {
  cosine: { of: (score) => Math.max(0, Math.min(1, score)), words: "cosine, from 0 to 1" },
  l2: { of: (score) => 1 / (1 + Math.max(0, -score)), words: "1 / (1 + distance), from 0 to 1" },
};

function barOf(score, metric) {
  const scale = SCALES[metric];
  if (!scale) return null;
  const fill = h("span", { class: "bar-fill" });
  fill.style.width = `${100 * scale.of(score)}%`;
  return h("div", { class: "bar thin", "aria-hidden": "true", title: scale.words }, fill);
}

const MOST_LISTS = 24; // that are named

// The inverted lists that a search read for its only query, in words; "" where it read none.
export const listsRead = ({ scanned } = {}) => {
  const [lists = []] = scanned ?? [];
  if (!lists.length) return "";
  const more = lists.length > MOST_LISTS ? ` and ${lists.length - MOST_LISTS} more` : "";
  return ` · ${many(lists.length, "list")} read, nearest first: ${lists.slice(0, MOST_LISTS).join(", ")}${more}`;
};

export function titleOf({ id, metadata }) {
  const named = [metadata?.title, metadata?.name].find((one) => typeof one === "string" && one.trim());
  return named ?? id;
}

// A hit as an item of a list, with `more` beside its score.
export function hitOf(hit, metric, ...more) {
  const { id, score, start, end, text: words } = hit;
  const title = titleOf(hit);
  return h(
    "li",
    { class: "hit" },
    h("div", { class: "hit-head" }, h("strong", {}, title), title === id ? null : h("span", { class: "under mono" }, id), h("span", { class: "hit-score number" }, score.toFixed(3)), ...more),
    barOf(score, metric),
    h("p", { class: "passage-text" }, words ?? "(stored without text)"),
    h("p", { class: "hint" }, `characters ${count(start ?? 0)} to ${count(end ?? 0)}`),
  );
}
