// The live view of the engines: one stream of events, open only while the page can be seen.

import { readEvents, request } from "./api.js";
import { $ } from "./elements.js";
import { EnginePanel } from "./panel.js";

const RECONNECT_MS = 2000;

export class Live {
  #onState;
  #onTurn;
  #awake = ""; // the models that are awake, where there are several
  #panels = [];
  #stream = null; // the AbortController of the stream that is open
  #timer = 0;
  #started = false;

  /**
   * `onState(state)` hears "wait", "live", "restart" or "lost"; `onTurn()` that a model has
   * fallen asleep or woken up.
   */
  constructor(onState, onTurn) {
    this.#onState = onState;
    this.#onTurn = onTurn;
    document.addEventListener("visibilitychange", () => this.#follow());
    const redraw = () => this.#panels.forEach((panel) => panel.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    $("theme").addEventListener("change", redraw);
    new ResizeObserver(redraw).observe($("engine")); // also once it is shown
  }

  /** Begins to watch; watching goes on by itself after that. */
  start() {
    this.#started = true;
    this.#follow();
  }

  #follow() {
    clearTimeout(this.#timer);
    if (document.hidden || !this.#started) {
      this.#stream?.abort();
      this.#stream = null;
    } else if (!this.#stream) {
      this.#watch();
    }
  }

  async #watch() {
    const stream = (this.#stream = new AbortController());
    try {
      const response = await request("/page/live", { signal: stream.signal });
      this.#panels.forEach((panel) => panel.interrupt());
      showReplica(response.headers.get("X-Aioinfer-Replica"));
      for await (const data of readEvents(response.body)) this.#take(JSON.parse(data));
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    if (this.#stream !== stream) return;
    this.#stream = null;
    this.#onState("lost");
    this.#timer = setTimeout(() => this.#follow(), RECONNECT_MS);
  }

  #take({ time, engines }) {
    while (this.#panels.length < engines.length) {
      const name = engines.length > 1 ? `Engine ${this.#panels.length}` : "Engine";
      this.#panels.push(new EnginePanel(engines[this.#panels.length].model ?? name));
    }
    engines.forEach((engine, index) => this.#panels[index].take(engine, time));
    const awake = engines.map(({ model, asleep }) => (asleep ? "" : model)).join(" ").trim();
    if (awake !== this.#awake) this.#onTurn();
    this.#awake = awake;
    const serves = engines.some((engine) => !engine.dead && !engine.restart);
    const returns = engines.some((engine) => engine.restart);
    this.#onState(serves ? "live" : returns ? "restart" : "lost");
  }
}

/** Says of which replica the engines are, behind a gateway, and of how many it is one. */
async function showReplica(name) {
  const line = $("replica");
  line.hidden = name === null;
  if (name === null) return;
  line.textContent = `Replica ${name}`;
  try {
    const { replicas } = await (await request("/health/ready")).json();
    line.textContent += `, one of ${replicas}; an answer may come from any of them`;
  } catch {
    // how many there are is not worth a word to the user
  }
}
