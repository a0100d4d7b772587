// Polls the mesh while the page is visible: one call at a time, less often while no router answers.

import { ask } from "./api.js";

const AWAY_MS = [500, 1000, 2000, 3000];

export class Poll {
  constructor(path, told, failed) {
    Object.assign(this, { path, told, failed, everyMs: 1000, tries: 0, busy: false, timer: 0 });
    document.addEventListener("visibilitychange", () => this.now());
  }

  every(milliseconds) {
    this.everyMs = milliseconds;
    this.now();
  }

  // Looks at once, unless a look is under way.
  now() {
    clearTimeout(this.timer);
    if (!this.busy && !document.hidden) this.#look();
  }

  async #look() {
    this.busy = true;
    try {
      const { body } = await ask(this.path, { signal: AbortSignal.timeout(10000) });
      this.tries = 0;
      this.told(body);
    } catch (error) {
      this.tries += 1;
      this.failed(error);
    } finally {
      this.busy = false;
    }
    const wait = this.tries ? AWAY_MS[Math.min(this.tries, AWAY_MS.length) - 1] : this.everyMs;
    if (!document.hidden) this.timer = setTimeout(() => this.now(), wait);
  }
}
