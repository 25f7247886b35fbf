// The way to the server: requests with the key, errors as the server words them, and streams of
// events.

import { parsed } from "./json.js";

const KEY = "aioinfer-api-key";

export const JSON_BODY = { "Content-Type": "application/json" }; // headers

/**
 * An answer that is no success; `status` is 0 when there was no answer. `param` is the field of the
 * request that is at fault, if there is one; the message names it.
 */
export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(param && !message.includes(param) ? `${param}: ${message}` : message);
    this.status = status;
    this.param = param;
    this.isStarting = false; // whether the server is still loading its model
  }
}

/** What the user reads of an error: its status, where there is one, and its message. */
export const said = ({ status, message }) => (status ? `${status}: ${message}` : message);

/** Keeps an API key for as long as the tab lives. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Returns the headers that hold the key, if there is one. */
export function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/**
 * Sends a request with the key, if there is one; `options` are those of `fetch`. Throws `ApiError`
 * where no answer comes, or `AbortError`.
 */
export async function send(path, { headers, ...options } = {}) {
  try {
    const all = { ...authorization(), ...headers };
    return await fetch(`.${path}`, { headers: all, cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
}

/** Gets `path`, or posts `body` to it as JSON. Throws as `send` does, and for a refusal `ApiError`. */
export async function request(path, { body, signal } = {}) {
  const post = { method: "POST", headers: JSON_BODY, body: JSON.stringify(body) };
  const response = await send(path, { ...(body && post), signal });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let error = parsed(await response.text())?.error; // a page of HTML, mostly, is nothing for people
  if (typeof error?.message !== "string") {
    const message = [502, 503, 504].includes(response.status)
      ? "The server behind this address does not answer."
      : "Something between this page and the server refused the request.";
    error = { message };
  }
  const wait = response.headers.get("Retry-After");
  const isStarting = error.code === "not_ready";
  const message = wait && !isStarting ? `${error.message} (try again in ${wait} s)` : error.message;
  const made = new ApiError(response.status, message, error.param);
  made.isStarting = isStarting;
  return made;
}

/** Yields the text of a byte stream as it comes; whoever stops listening ends the stream. */
export async function* readText(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder(); // holds back the bytes of half a character
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read())
      yield decoder.decode(part.value, { stream: true });
  } finally {
    reader.cancel().catch(() => {}); // whoever stops listening need not hear that it had failed
  }
}

/**
 * Yields the data of each server-sent event (WHATWG HTML, 9.2.6) of a byte stream, wherever the
 * borders of its chunks are.
 */
export async function* readEvents(stream) {
  let rest = "";
  let data = [];
  for await (const text of readText(stream)) {
    const lines = (rest + text).split(/\r\n|\n|\r(?!$)/); // a CR at the end may be half of a line break
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) {
        data.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
