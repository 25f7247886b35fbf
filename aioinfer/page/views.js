// How the parts of an answer are shown that are no Markdown: plain text, and thoughts.

import { $, element, whole } from "./elements.js";

const TOUCH_MS = 1000; // how long after that a scrolling is the user's
const SLACK = 40; // px from the end within which whoever scrolls down follows it again

/**
 * Keeps the end of a scrolled part in sight while it grows, but for whoever has scrolled up. Nothing
 * is measured for that: formulas, fonts and pictures may grow behind the last change.
 */
class Follower {
  #node;
  #jump; // the button that is offered to whoever has scrolled up
  #follows = true;
  #last = 0; // where it was scrolled to
  #touched = -TOUCH_MS; // when keys, wheel or fingers have last been at it
  #frame = 0;

  constructor(node, jump = null) {
    this.#node = node;
    this.#jump = jump;
    jump?.addEventListener("click", () => this.begin());
    new ResizeObserver(() => this.showSoon()).observe(node);
    node.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"])
      node.addEventListener(kind, () => (this.#touched = performance.now()), { passive: true });
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#node;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < SLACK;
    if (isAtEnd && scrollTop > this.#last) this.#follows = true;
    // a text that has become shorter is scrolled up, too, by a little
    const isUsers = performance.now() - this.#touched < TOUCH_MS;
    const by = this.#last - scrollTop;
    if (!isAtEnd && by > (isUsers ? 0 : clientHeight / 2)) this.#follows = false;
    if (this.#jump) this.#jump.hidden = this.#follows;
    this.#last = scrollTop;
  }

  /** Shows the end, if it is followed. */
  show() {
    if (!this.#follows) return;
    this.#node.scrollTop = this.#node.scrollHeight;
    this.#last = this.#node.scrollTop;
  }

  /** Shows the end in the next frame, behind all changes that come until then. */
  showSoon() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.show();
    });
  }

  /** Follows the end from now on; what comes into sight there may change its height. */
  begin() {
    this.#follows = true;
    if (this.#jump) this.#jump.hidden = true; // a short log is not scrolled
    this.show();
    this.showSoon();
  }
}

const log = new Follower($("log"), $("to-end"));

/** Changes what the log shows, and keeps its end in sight. */
export function followEnd(change) {
  change();
  log.show();
}

/** Does so for changes that come many times a frame. */
export function followSoon(change) {
  change();
  log.showSoon();
}

/** Shows the end of the log, and follows it from now on. */
export function showEnd() {
  log.begin();
}

const BLOCK = 2000; // characters after which a block of plain text ends at its next line break
const LONGEST = 8000; // and at a space where there is none: that line is broken there

/**
 * Shows a text that grows as it is; a `MarkdownView` for texts without Markdown. The text is divided
 * into blocks, so that only the last one is laid out again.
 */
export class PlainView {
  text = "";
  #container;
  #node = null; // the text of the last block, while it grows
  #around;

  constructor(container, around) {
    container.classList.add("plain");
    this.#container = container;
    this.#around = around;
  }

  append(text) {
    this.text += text;
    this.#around(() => {
      for (let rest = text; rest;) rest = this.#fill(rest);
    });
  }

  /** Adds what the last block has room for; returns the rest. */
  #fill(text) {
    if (!this.#node) {
      this.#node = document.createTextNode("");
      this.#container.append(element("div", "plain-block", "", this.#node));
    }
    const end = endOfBlock(text, this.#node.length);
    this.#node.appendData(end ? text.slice(0, end) : text);
    if (!end) return "";
    this.#container.lastChild.classList.add("final");
    this.#node = null;
    return text.slice(end);
  }

  finish() {}
}

/** Where a block that has `length` characters ends in the text that follows; 0 if it goes on. */
function endOfBlock(text, length) {
  const line = text.indexOf("\n", Math.max(0, BLOCK - length));
  const from = Math.max(0, LONGEST - length);
  const space = text.slice(from).search(/\s/);
  const ends = [line, space < 0 ? -1 : from + space].filter((at) => at >= 0);
  return ends.length ? Math.min(...ends) + 1 : 0;
}

/**
 * Shows a model's thoughts as they come, folded: how long they are and how long they took is seen
 * without opening them. They may come in several parts, whose times are added.
 */
export class Thought {
  node = element("details", "thought");
  #summary = element("summary", "", "Thinking");
  #view;
  #end;
  #since = 0; // when the part that is coming began; 0 between parts
  #spent = 0; // ms

  /** `keptMs`: the time of thoughts that have come before. */
  constructor(keptMs = 0) {
    this.#spent = keptMs;
    const body = element("div", "thought-text");
    body.tabIndex = 0; // to be scrolled by keyboard
    this.#view = new PlainView(body, followSoon);
    this.#end = new Follower(body);
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
    if (this.node.open) this.#end.showSoon();
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
