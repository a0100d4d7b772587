// Sessions: list, transcript, continuation in the chat, deletion with its proof.

import { ask, segment } from "./api.js";
import { said } from "./chat.js";
import { h, text } from "./dom.js";
import { ago, count, many, seconds } from "./format.js";
import { Tiers } from "./tiers.js";

const PAGE = 50;

export class Sessions {
  title = "Sessions";

  constructor() {
    this.list = h("ul", { class: "session-list", "aria-label": "Sessions" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.#load(this.next) }, "Show more");
    this.empty = h("p", { class: "quiet", hidden: true }, "No session is kept. A chat begins one.");
    this.failed = h("p", { class: "error", role: "alert", hidden: true });
    this.done = h("p", { class: "note", role: "status", hidden: true });
    this.tiers = new Tiers();
    this.asked = 0;
    this.opened = h("section", { class: "transcript", "aria-label": "Transcript", tabindex: "-1", hidden: true });
    this.element = h(
      "div",
      { class: "view sessions" },
      h("h1", { class: "unseen" }, "Sessions"),
      this.failed,
      this.done,
      h("div", { class: "beside" }, h("div", {}, this.empty, this.list, this.more), this.opened),
    );
  }

  async show(argument) {
    await this.#load(null);
    if (argument) await this.#open(argument);
    else if (this.current && !this.opened.hidden) this.tiers.watch(this.current);
  }

  hide() {
    this.tiers.stop();
  }

  // A list that arrives after a later one was asked for is dropped.
  async #load(after) {
    const nth = ++this.asked;
    try {
      const { body } = await ask(`/v1/sessions?limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
      if (nth !== this.asked) return;
      const items = body.data.map((session) => this.#item(session));
      if (after) this.list.append(...items);
      else this.list.replaceChildren(...items);
      this.next = body.next;
      this.more.hidden = !body.has_more;
      this.empty.hidden = this.list.children.length > 0;
      this.#complain("");
    } catch (error) {
      if (nth !== this.asked) return;
      if (error.locked) this.#forget();
      this.#complain(error.message);
    }
  }

  // Without a key nothing is known: neither that there is a session nor that there is none.
  #forget() {
    this.list.replaceChildren();
    this.more.hidden = this.empty.hidden = this.opened.hidden = this.done.hidden = true;
    this.tiers.stop();
    this.current = null;
  }

  #item(session) {
    const title = typeof session.metadata?.title === "string" ? session.metadata.title : session.id;
    const open = h(
      "button",
      { class: "session-open", type: "button", onclick: () => this.#open(session.id) },
      h("strong", {}, title),
      h("span", { class: "under" }, `${many(session.turns, "turn")} · ${many(session.tokens, "token")} · ${ago(session.updated)}`),
    );
    const item = h("li", { "data-session": session.id }, open);
    if (session.id === this.current) item.classList.add("current");
    return item;
  }

  async #open(id) {
    this.current = id;
    this.opened.hidden = true; // what is about to be replaced must not be acted on
    this.tiers.stop();
    for (const item of this.list.children) item.classList.toggle("current", item.dataset.session === id);
    try {
      const { body } = await ask(`/v1/sessions/${segment(id)}?include=messages`);
      if (this.current !== id) return;
      this.#complain("");
      this.#transcript(body);
      this.opened.focus({ preventScroll: true });
      this.opened.scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.#complain(error.message);
    }
  }

  #transcript(session) {
    const remove = h("button", { class: "danger", type: "button" }, "Delete");
    remove.addEventListener("click", () => this.#delete(session.id, remove));
    const ends = session.updated + session.ttl_s - Date.now() / 1000;
    this.opened.hidden = false;
    this.tiers.watch(session.id);
    this.opened.replaceChildren(
      h("p", { class: "under mono" }, session.id),
      h("p", { class: "hint" }, `${session.model} · version ${count(session.version)} · kept for ${seconds(Math.max(0, Math.floor(ends)))} more${session.running ? " · a turn is running" : ""}`),
      h("div", { class: "row" }, h("a", { class: "button", href: `#/chat/${encodeURIComponent(session.id)}` }, "Continue in the chat"), remove),
      this.tiers.element,
      ...session.messages.map(said),
    );
  }

  // Asked twice, for it cannot be undone.
  async #delete(id, button) {
    if (!button.classList.contains("sure")) {
      button.classList.add("sure");
      text(button, "Delete for good");
      return;
    }
    button.disabled = true;
    text(button, "Deleting…");
    try {
      const { body } = await ask(`/v1/sessions/${segment(id)}`, { method: "DELETE" });
      const gone = Object.entries(body.removed).map(([what, number]) => `${number} ${what}`);
      this.done.hidden = false;
      text(this.done, `Deleted${gone.length ? `: ${gone.join(", ")}` : ""}. Every key was searched afterwards; nothing of the session is left.`);
      this.opened.hidden = true;
      this.tiers.stop();
      this.current = null;
      await this.#load(null);
    } catch (error) {
      button.disabled = false;
      button.classList.remove("sure");
      text(button, "Delete");
      this.#complain(error.message);
    }
  }

  #complain(words) {
    this.failed.hidden = !words;
    text(this.failed, words);
  }
}
