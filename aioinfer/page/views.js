// How the parts of an answer are shown that are no Markdown: plain text, and thoughts.

import { element } from "./elements.js";

const whole = new Intl.NumberFormat("en");
const SCROLL_SLACK = 40; // px from the end of the log within which it follows new text

/** Changes what the log shows; if its end could be seen before, it can be seen afterwards. */
export function followEnd(change) {
  const log = document.getElementById("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < SCROLL_SLACK;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

let pending = null; // where the log stood before the changes of this frame; -1: not at its end

/**
 * Does what `followEnd` does for changes that come many times a frame: the log is measured once
 * before them, and scrolled once behind them. Whoever scrolls up meanwhile is left there.
 */
export function followSoon(change) {
  const log = document.getElementById("log");
  if (pending === null) {
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < SCROLL_SLACK;
    pending = follows ? log.scrollTop : -1;
    requestAnimationFrame(() => {
      if (pending >= 0 && log.scrollTop >= pending) log.scrollTop = log.scrollHeight;
      pending = null;
    });
  }
  change();
}

/** Shows a text that grows as it is; a `MarkdownView` for texts without Markdown. */
export class PlainView {
  text = "";
  #node = document.createTextNode("");
  #around;

  constructor(container, around) {
    container.classList.add("plain");
    container.append(this.#node);
    this.#around = around;
  }

  append(text) {
    this.text += text;
    this.#around(() => this.#node.appendData(text));
  }

  finish() {}
}

/**
 * Shows a model's thoughts as they come, folded: how long they are and how long they took is seen
 * without opening them. They may come in several parts, whose times are added.
 */
export class Thought {
  node = element("details", "thought");
  #summary = element("summary", "", "Thinking");
  #view;
  #since = 0; // when the part that is coming began; 0 between parts
  #spent = 0; // ms

  /** `keptMs`: the time of thoughts that have come before. */
  constructor(keptMs = 0) {
    this.#spent = keptMs;
    const body = element("div", "thought-text");
    body.tabIndex = 0; // to be scrolled by keyboard
    this.#view = new PlainView(body, followSoon);
    this.node.append(this.#summary, body);
  }

  get text() {
    return this.#view.text;
  }

  get ms() {
    return this.#spent;
  }

  append(text) {
    this.#since ||= performance.now();
    this.#view.append(text);
    this.#describe("Thinking", performance.now() - this.#since);
  }

  /** The answer goes on with something else, or has ended. */
  pause() {
    if (!this.#since) return;
    this.#spent += performance.now() - this.#since;
    this.#since = 0;
    this.#describe("Thought", 0);
  }

  #describe(verb, more) {
    const seconds = ((this.#spent + more) / 1e3).toFixed(1);
    const length = whole.format(this.text.length);
    this.#summary.textContent = `${verb} for ${seconds} s · ${length} characters`;
  }
}
