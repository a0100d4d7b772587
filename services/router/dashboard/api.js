// The router's API: sends the key that was typed in, and turns errors into sentences.

const STORED = "spillway-key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retry = false } = {}) {
    super(message);
    Object.assign(this, { status, code, retry });
  }

  // No answer came: the router is away, or between here and there something is.
  get away() {
    return this.status === 0 && this.code !== "aborted";
  }

  // A key is missing or wrong: nothing is known, so nothing may be said to be empty.
  get locked() {
    return this.status === 401;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED)),
};

// A key is missing or wrong: {detail: why}.
export const keyNeeded = new EventTarget();
// A call reached no router.
export const routerAway = new EventTarget();

export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const given = { ...headers };
  if (key.get()) given.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) given["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: given,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw new ApiError("stopped", { code: "aborted" });
    routerAway.dispatchEvent(new Event("away"));
    throw new ApiError("the router cannot be reached");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  const told = await response.json().catch(() => ({}));
  const message = told.error?.message ?? `the router answered ${response.status}`;
  if (response.status === 401) keyNeeded.dispatchEvent(new CustomEvent("needed", { detail: message }));
  return new ApiError(response.status === 401 ? locked(message) : message, {
    status: response.status,
    code: told.error?.code ?? "",
    retry: response.headers.get("x-should-retry") === "true",
  });
}

function locked(message) {
  return key.get() ? `The router refused this key: ${message}. The button Key takes another one.` : "A key is needed to see this. The button Key takes one.";
}

export async function ask(path, options) {
  const response = await send(path, options);
  try {
    return { body: await response.json(), request: response.headers.get("x-request-id") };
  } catch {
    throw new ApiError("the answer broke off");
  }
}

// A name of this page's own; crypto.randomUUID exists only where the page came over TLS or from this machine.
export function unique() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const segment = (name) => name.split("/").map(encodeURIComponent).join("/");
