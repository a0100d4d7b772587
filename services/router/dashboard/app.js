// Starts the page: routes to views, shows the router's state, holds the key.

import { routerAway } from "./api.js";
import { Poll } from "./poll.js";
import { Chat } from "./chat.js";
import { Collections } from "./collections.js";
import { KeyDialog } from "./key.js";
import { Mesh } from "./mesh.js";
import { Search } from "./search.js";
import { Sessions } from "./sessions.js";
import { Timeline } from "./timeline.js";
import { text } from "./dom.js";

const LOOK_MS = 1000;
const GLANCE_MS = 5000; // where only the router's state is shown of it

const main = document.getElementById("main");
const views = { mesh: new Mesh(), chat: new Chat(), search: new Search(), collections: new Collections(), sessions: new Sessions(), timeline: new Timeline() };
let shown = null;

const poll = new Poll(
  "/v1/mesh",
  (mesh) => {
    state(mesh.router.draining ? "draining" : "live");
    dialog.keysAre(mesh.router.keys);
    views.mesh.set(mesh);
  },
  (error) => {
    state(error.status === 401 ? "locked" : "away", error.message);
    views.mesh.lost(error);
  },
);
const dialog = new KeyDialog(() => {
  poll.now();
  shown?.show?.(argument());
});

const WORDS = { live: "live", draining: "stopping", locked: "needs a key", away: "router away" };

function state(name, why = "") {
  const element = document.getElementById("state");
  element.className = name;
  element.title = why;
  text(element.querySelector(".words"), WORDS[name]);
}

// `#/<view>/<argument>`; other hashes are ignored.
function argument() {
  return decodeURIComponent(location.hash.split("/").slice(2).join("/"));
}

function route() {
  const name = location.hash.split("/")[1] || "mesh";
  const view = views[name] ?? views.mesh;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view !== shown) {
    shown?.hide?.();
    main.replaceChildren(view.element);
    shown = view;
    document.title = `${view.title} · Spillway`;
    window.scrollTo(0, 0);
  }
  view.show?.(argument());
  poll.every(view === views.mesh ? LOOK_MS : GLANCE_MS);
}

routerAway.addEventListener("away", () => poll.now());
window.addEventListener("hashchange", route);
route();
