// A chat to try the mesh: streamed; grounded in a collection if one is chosen; kept in a session unless that is off.

import { Answer } from "./answer.js";
import { ask, segment } from "./api.js";
import { names, offer } from "./collection_names.js";
import { h, text } from "./dom.js";
import { ago, many } from "./format.js";
import { remember } from "./recent.js";
import { Stream } from "./stream.js";

const PASSAGES = 4;
const NEAR_PX = 400;
const TITLE = 40;
const NEW = "new";
const NONE = "none";

export class Chat {
  title = "Chat";

  constructor() {
    this.collection = h("select", { id: "chat-collection" });
    this.rewrite = h("input", { id: "chat-rewrite", type: "checkbox" });
    this.model = h("select", { id: "chat-model", onchange: () => this.#choose(this.chosen === NONE ? NONE : NEW) });
    this.models = h("div", { class: "field", hidden: true }, h("label", { for: "chat-model" }, "Model"), this.model);
    this.session = h("select", { id: "chat-session", onchange: () => this.#choose(this.session.value) });
    this.input = h("textarea", { id: "chat-text", rows: "1", placeholder: "Ask something", onkeydown: (event) => this.#key(event), oninput: () => this.#grow() });
    this.submit = h("button", { class: "primary", type: "submit" }, "Send");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.#stop() }, "Stop");
    this.fresh = h("button", { class: "plain", type: "button", onclick: () => this.#choose(this.chosen === NONE ? NONE : NEW).then(() => this.input.focus()) }, "New chat");
    this.hello = h("p", { class: "quiet hello" }, "Ask about a collection's documents, or just talk. An answer shows the passages that it cites.");
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Conversation" }, this.hello);
    this.failed = h("p", { class: "error", role: "alert", hidden: true });
    const form = h("form", { class: "ask", onsubmit: (event) => this.#send(event) }, h("label", { for: "chat-text", class: "unseen" }, "Your message"), this.input, this.stop, this.submit);
    this.element = h(
      "div",
      { class: "view chat" },
      h("h1", { class: "unseen" }, "Chat"),
      h(
        "div",
        { class: "choices" },
        h("div", { class: "field" }, h("label", { for: "chat-collection" }, "Grounded in"), this.collection),
        h("div", { class: "field" }, h("label", { for: "chat-rewrite" }, "Rewrite follow-ups"), this.rewrite),
        this.models,
        h("div", { class: "field" }, h("label", { for: "chat-session" }, "Session"), this.session),
        this.fresh,
      ),
      this.log,
      this.failed,
      form,
    );
    this.fresh.hidden = true;
    this.chosen = NEW;
    this.messages = []; // without a session, the page itself keeps what was said
    this.stream = null;
    this.#sessions([]);
  }

  async show(argument) {
    const [found, models, sessions] = await Promise.allSettled([names(), ask("/v1/models"), ask("/v1/sessions?limit=30")]);
    if (models.status === "fulfilled") this.#generators(models.value.body.data);
    if (found.status === "fulfilled") this.#collections(found.value);
    if (sessions.status === "fulfilled") this.#sessions(sessions.value.body.data);
    this.#unlock([found, models, sessions].find(({ reason }) => reason?.locked)?.reason);
    if (argument && argument !== this.chosen) await this.#choose(argument);
    this.input.focus({ preventScroll: true });
  }

  // Says that a key is missing or wrong, until one is taken; what another key could see is no longer offered.
  #unlock(refusal) {
    if (refusal) {
      this.collection.replaceChildren();
      this.#sessions([]);
      this.#complain(refusal.message);
    } else if (this.locked) {
      this.#complain("");
    }
    this.locked = Boolean(refusal);
  }

  #collections(found) {
    const first = this.collection.options.length === 0;
    offer(this.collection, found, "no collection");
    if (first && found.length) this.collection.value = found.includes("handbook") ? "handbook" : "";
  }

  // A choice only where there is one.
  #generators(models) {
    const found = models.filter(({ kind }) => kind === "generate").map(({ id }) => id);
    offer(this.model, found, "the default");
    this.models.hidden = found.length < 2;
  }

  #sessions(found) {
    const rest = found.map((one) => h("option", { value: one.id }, titleOf(one)));
    this.session.replaceChildren(h("option", { value: NEW }, "a new one"), h("option", { value: NONE }, "none: nothing is kept"), ...rest);
    this.#select();
  }

  #select(title = "this one") {
    if (![...this.session.options].some(({ value }) => value === this.chosen)) this.session.append(h("option", { value: this.chosen }, title));
    this.session.value = this.chosen;
  }

  // Begins a conversation, or goes on with one the server keeps.
  async #choose(session) {
    this.chosen = session;
    this.messages = [];
    this.log.replaceChildren(this.hello);
    this.fresh.hidden = true;
    this.#complain("");
    this.#select();
    if (session === NEW || session === NONE) return;
    try {
      const { body } = await ask(`/v1/sessions/${segment(session)}?include=messages`);
      const turns = body.messages.filter(({ role }) => role !== "system").map(said);
      if (turns.length) this.log.replaceChildren(...turns);
      this.fresh.hidden = false;
      this.#down();
    } catch (error) {
      this.#complain(error.message);
    }
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit.form.requestSubmit(this.submit);
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 200)}px`;
  }

  async #send(event) {
    event.preventDefault();
    const words = this.input.value.trim();
    if (!words || this.stream) return;
    this.#complain("");
    const answer = new Answer();
    this.hello.remove();
    this.log.append(said({ role: "user", content: words }), answer.element);
    this.input.value = "";
    this.#grow();
    this.#busy(true);
    this.#down();
    try {
      await this.#answer(words, answer);
    } finally {
      this.stream = null;
      this.#busy(false);
      this.#down();
    }
  }

  async #answer(words, answer) {
    const message = { role: "user", content: words };
    try {
      const body = await this.#body(message);
      this.stream = new Stream(body, ({ request, broken }) => {
        if (request) remember(request, words);
        if (broken === true) answer.note("the connection broke; waiting for the router…");
        if (broken === false) answer.resumed = (answer.resumed ?? 0) + 1;
        if (broken === false) answer.note("");
      });
      for await (const chunk of this.stream.chunks()) {
        answer.take(chunk);
        this.#down();
      }
      answer.stopped = this.stream.stopped.signal.aborted;
      answer.end(this.stream.request);
      if (!answer.stopped) this.messages.push(message, { role: "assistant", content: answer.said });
    } catch (error) {
      answer.fail(error, this.stream?.request);
    }
  }

  async #body(message) {
    const body = { messages: [message] };
    if (this.collection.value) body.retrieval = { collection: this.collection.value, k: PASSAGES, include_passages: true, rewrite: this.rewrite.checked };
    const model = this.model.value || undefined;
    if (this.chosen === NONE) return { ...body, model, messages: [...this.messages, message] };
    if (this.chosen === NEW) {
      const { body: made } = await ask("/v1/sessions", { method: "POST", body: { model, metadata: { from: "dashboard", title: message.content.slice(0, 80) } } });
      this.chosen = made.id;
      this.#select(short(message.content));
    }
    return { ...body, session: this.chosen };
  }

  #busy(is) {
    this.stop.hidden = !is;
    this.submit.hidden = is;
    this.session.disabled = this.fresh.disabled = is;
    this.fresh.hidden = false;
    if (!is) this.input.focus({ preventScroll: true });
  }

  async #stop() {
    await this.stream?.stop();
  }

  #complain(words) {
    this.failed.hidden = !words;
    text(this.failed, words);
  }

  // Keeps the newest in sight, unless somebody reads further up.
  #down() {
    const page = document.documentElement;
    if (page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX) page.scrollTop = page.scrollHeight;
  }
}

const short = (words) => (words.length > TITLE ? `${words.slice(0, TITLE - 1)}…` : words);

function titleOf({ metadata, turns, updated }) {
  const title = typeof metadata?.title === "string" ? short(metadata.title) : many(turns, "turn");
  return `${title}, ${ago(updated)}`;
}

// One message of a conversation.
export function said(message) {
  const { role, content } = message;
  if (role === "assistant") return Answer.kept(message);
  const label = role === "user" ? "Question" : "Instructions";
  return h("article", { class: `turn ${role}`, "aria-label": label }, h("p", { class: "said" }, content));
}
