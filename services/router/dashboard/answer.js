// One answer while it streams: its text, the passages in its prompt, and its citations.

import { h, text } from "./dom.js";
import { count, many, seconds } from "./format.js";
import { timelineOf } from "./recent.js";

let made = 0;

export class Answer {
  constructor() {
    made += 1;
    this.name = `answer-${made}`;
    this.began = performance.now();
    this.firstS = null;
    this.said = "";
    this.body = h("p", { class: "said" });
    this.hint = h("p", { class: "hint" }, "waiting…");
    this.meta = h("p", { class: "meta" });
    this.passages = h("div", { class: "passages" });
    this.element = h("article", { class: "turn assistant", "aria-busy": "true", "aria-label": "Answer" }, this.body, this.hint, this.passages, this.meta);
  }

  // A chunk of the stream.
  take(chunk) {
    if (chunk.retrieval) this.#rests(chunk.retrieval);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.delta?.content) {
      this.firstS ??= (performance.now() - this.began) / 1000;
      this.said += choice.delta.content;
      text(this.body, this.said);
      this.hint.hidden = true;
    }
    if (choice.delta?.citations) this.citations = choice.delta.citations;
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  // An answer of a conversation that the server kept: what it rests on can be opened as when it was given.
  static kept({ content, retrieval, citations, finish_reason: finish }) {
    const answer = new Answer();
    answer.take({ retrieval, choices: [{ delta: { content, citations }, finish_reason: finish }] });
    answer.element.removeAttribute("aria-busy");
    answer.note("");
    answer.#cite();
    return answer.element;
  }

  note(words) {
    this.hint.hidden = !words;
    text(this.hint, words);
  }

  end(request) {
    this.element.removeAttribute("aria-busy");
    this.note(this.said ? "" : "No text came.");
    this.#cite();
    this.#tell(request);
  }

  fail(error, request) {
    this.element.removeAttribute("aria-busy");
    this.element.classList.add("failed");
    this.element.append(h("p", { class: "error", role: "alert" }, error.message));
    this.hint.hidden = true;
    this.#tell(request);
  }

  #tell(request) {
    const tookS = (performance.now() - this.began) / 1000;
    const facts = [];
    if (this.firstS !== null) facts.push(`first token after ${seconds(this.firstS)}`);
    if (this.usage) {
      const tokens = this.usage.completion_tokens;
      facts.push(many(tokens, "token"));
      if (tokens > 1 && tookS > this.firstS) facts.push(`${count((tokens - 1) / (tookS - this.firstS))} a second`);
    }
    if (this.finish === "length") facts.push("cut off at its length limit");
    if (this.stopped) facts.push("stopped");
    if (this.resumed) facts.push(`resumed after ${many(this.resumed, "break")}`);
    this.meta.replaceChildren(facts.join(" · "));
    if (request) this.meta.append(facts.length ? " · " : "", h("a", { href: timelineOf(request) }, "timeline"));
  }

  // What the answer rests on; passages that are found while it is written join those before.
  #rests({ collection, found, passages, rewrite }) {
    const begins = !this.shown;
    this.rewrite ??= rewrite;
    this.shown ??= new Map();
    for (const passage of passages.filter(({ index }) => !this.shown.has(index))) {
      this.shown.set(passage.index, passageOf(passage, `${this.name}-passage-${passage.index}`));
    }
    this.passages.replaceChildren(
      h("p", { class: "rests" }, this.shown.size || found ? `${many(this.shown.size, "passage")} from ${collection}` : `No passage found in ${collection}`),
      this.rewrite ? h("p", { class: "hint" }, `searched for: ${this.rewrite.query}`) : "",
      ...this.shown.values(),
    );
    if (begins) this.note(found ? "reading the passages…" : "");
  }

  // Each place that the server found to be a citation becomes a link; it counts characters, not code units.
  #cite() {
    if (!this.citations?.length || !this.shown) return;
    const letters = Array.from(this.said);
    const parts = [];
    let done = 0;
    for (const { index, at } of this.citations) {
      const item = this.shown.get(index);
      item?.classList.add("cited");
      if (!item || at[0] < done) continue;
      parts.push(letters.slice(done, at[0]).join(""), this.#link(letters.slice(at[0], at[1]).join(""), index, item));
      done = at[1];
    }
    parts.push(letters.slice(done).join(""));
    this.body.replaceChildren(...parts);
  }

  #link(mark, index, item) {
    const open = (event) => {
      event.preventDefault();
      item.open = true;
      item.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      item.querySelector("summary").focus({ preventScroll: true });
    };
    return h("a", { class: "cite", href: `#${item.id}`, onclick: open, "aria-label": `Passage ${index}` }, mark);
  }
}

export function passageOf({ index, document_id: id, start, end, score, text: words, page }, name) {
  return h(
    "details",
    { class: "passage", id: name },
    h(
      "summary",
      {},
      h("span", { class: "passage-index" }, String(index)),
      h("span", { class: "passage-name" }, id),
      h("span", { class: "passage-score" }, `score ${score.toFixed(2)}`),
    ),
    h("p", { class: "passage-text" }, words ?? "(the passage's text was not sent)"),
    h("p", { class: "hint" }, `${page ? `page ${page}, ` : ""}characters ${count(start)} to ${count(end)} of ${id}`),
  );
}
