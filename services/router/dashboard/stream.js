// A generation's stream over several connections: no chunk lost, none given twice, as in the SDK.

import { ApiError, segment, send, unique } from "./api.js";

const RESUME_S = 60; // how long the router keeps the request running while nobody reads
const SILENT_MS = 35000; // it sends a comment every 10 s at least
const DELAYS_MS = [50, 200, 400, 800, 1600, 2000];
const GOES_ON = new Set(["draining", "bus_down"]);

// The id of a chunk is `<event>.<choice>`.
function before(id, last) {
  if (!id || !last) return false;
  const [a, b] = [id, last].map((one) => one.split(".").map(Number));
  return a[0] < b[0] || (a[0] === b[0] && a[1] <= b[1]);
}

async function* frames(response, silence) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      silence.begin();
      const { value, done } = await reader.read();
      silence.end();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const found = { id: "", data: "" };
        for (const line of part.split("\n")) {
          const at = line.indexOf(":");
          if (at > 0) found[line.slice(0, at)] = line.slice(at + 1).replace(/^ /, "");
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Ends a connection on which no frame arrives for too long.
class Silence {
  constructor(signal) {
    this.controller = new AbortController();
    signal.addEventListener("abort", () => this.controller.abort(), { once: true });
  }

  begin() {
    this.timer = setTimeout(() => this.controller.abort(), SILENT_MS);
  }

  end() {
    clearTimeout(this.timer);
  }
}

export class Stream {
  // `told` is called with {request} when the request is known, and with {broken: true | false} as connections go and come.
  constructor(body, told = () => {}) {
    this.body = { ...body, stream: true, stream_options: { include_usage: true } };
    this.told = told;
    this.idempotency = unique();
    this.stopped = new AbortController();
    this.request = null;
    this.last = "";
  }

  // Stops reading and ends the request on the server.
  async stop() {
    this.stopped.abort();
    if (this.request) {
      await send(`/v1/requests/${segment(this.request)}/cancel`, { method: "POST" }).catch(() => {});
    }
  }

  async *chunks() {
    let tries = 0;
    let lostAt = 0;
    for (;;) {
      const silence = new Silence(this.stopped.signal);
      try {
        const response = await this.#connect(silence.controller.signal);
        this.#named(response.headers.get("x-request-id"));
        for await (const { id, data } of frames(response, silence)) {
          if (tries) this.told({ broken: false });
          tries = lostAt = 0;
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error && GOES_ON.has(chunk.error.code)) break;
          if (chunk.error) throw new ApiError(chunk.error.message, { status: 500, code: chunk.error.code });
          if (before(id, this.last)) continue;
          this.last = id || this.last;
          yield chunk;
        }
      } catch (error) {
        silence.end();
        if (this.stopped.signal.aborted) return;
        if (error instanceof ApiError && !error.away && error.code !== "aborted" && !(error.status === 503 && error.retry)) throw error;
        if (error instanceof SyntaxError) throw new ApiError("a chunk of the answer is not JSON");
      }
      if (this.stopped.signal.aborted) return;
      lostAt ||= Date.now();
      if (Date.now() - lostAt > RESUME_S * 1000) throw new ApiError("the router stayed away; the answer is cut off here");
      this.told({ broken: true });
      await new Promise((resolve) => setTimeout(resolve, DELAYS_MS[Math.min(tries, DELAYS_MS.length - 1)]));
      tries += 1;
    }
  }

  #connect(signal) {
    const headers = { "Spillway-Resume": String(RESUME_S) };
    if (this.last) headers["Last-Event-ID"] = this.last;
    if (this.request) return send(`/v1/requests/${segment(this.request)}/events`, { headers, signal });
    headers["Idempotency-Key"] = this.idempotency;
    return send("/v1/chat/completions", { method: "POST", body: this.body, headers, signal });
  }

  #named(request) {
    if (this.request || !request) return;
    this.request = request;
    this.told({ request });
  }
}
