// The tenant's collections as the options of a select.

import { ask } from "./api.js";
import { h } from "./dom.js";

export async function all() {
  const { body } = await ask("/v1/collections");
  return body.data.sort((a, b) => (a.name < b.name ? -1 : 1));
}

export async function names() {
  return (await all()).map((one) => one.name);
}

// Fills a select and keeps the choice if it still exists; `first` is the option of none.
export function offer(select, found, first) {
  const chosen = select.value;
  select.replaceChildren(
    ...(first ? [h("option", { value: "" }, first)] : []),
    ...found.map((name) => h("option", { value: name }, name)),
  );
  if (found.includes(chosen)) select.value = chosen;
}
