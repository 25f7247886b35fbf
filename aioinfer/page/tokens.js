// The tokens of an answer by their probability, with the likeliest alternatives of each: what the
// model hesitated about, and how it would have gone on.

import { element } from "./elements.js";
import { tool } from "./menu.js";

const LEVELS = [0.9, 0.7, 0.4, 0.15]; // probabilities at which the colour changes
const BLOCK = 300; // tokens after which a block of them ends at its next line break
const LONGEST = 1500; // and anywhere where there is none
const BUDGET_MS = 4; // of a frame, for the making of blocks

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -4.6 ? 1 : 3)} %`;
const visible = (text) => text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "∅";

/** A token as it is kept: bytes only where the text is no whole letter. */
const shortened = ({ token, bytes, logprob }) =>
  token.includes("\ufffd") ? [token, logprob, bytes] : [token, logprob];
const full = ([text, logprob, bytes]) => ({ text, logprob, bytes });

/**
 * The tokens of one answer, each as JSON in a line of its own: a hundred thousand alternatives are
 * kept as one string, and parsed where they are shown.
 */
export class Tokens {
  #lines;
  #nodes = []; // of the view
  #view = null;
  #details = null;
  #onAlternative = null;

  /** `kept`: what `kept` returned of an answer that has come before. */
  constructor(kept = "") {
    this.#lines = typeof kept === "string" && kept ? kept.split("\n") : [];
  }

  get length() {
    return this.#lines.length;
  }

  get kept() {
    return this.#lines.join("\n");
  }

  /** A token, `{ text, logprob, bytes, top: [{ text, logprob, bytes }] }`. */
  #at(index) {
    const [own, ...top] = JSON.parse(this.#lines[index]);
    return { ...full(own), top: top.map(full) };
  }

  /** Takes the `logprobs.content` of an event, if there is any. */
  take(content) {
    for (const each of content ?? [])
      this.#lines.push(JSON.stringify([each, ...(each.top_logprobs ?? [])].map(shortened)));
  }

  /** Returns the text of the tokens before `index`, followed by another one. */
  textWith(index, alternative) {
    const before = Array.from({ length: index }, (_, at) => this.#at(at));
    const pieces = [...before, alternative];
    const bytes = pieces.flatMap(({ text, bytes: own }) => own ?? [...new TextEncoder().encode(text)]);
    return new TextDecoder().decode(new Uint8Array(bytes));
  }

  /** Returns the view; `onAlternative(text)` hears of the text that is to be gone on from. */
  view(onAlternative) {
    this.close();
    this.#onAlternative = onAlternative;
    this.#view = element("div", "tokens");
    const text = element("div", "token-text");
    const label = "Tokens, the less likely the darker; arrow keys move, Enter shows alternatives";
    Object.assign(text, { tabIndex: 0, role: "listbox", ariaLabel: label });
    let held = null; // the token that was clicked: others are on the pointer's way to its alternatives
    text.addEventListener("click", ({ target: { dataset } }) => {
      held = held === dataset.index ? null : dataset.index;
      this.#select(text, dataset.index);
    });
    text.addEventListener("pointerover", ({ target: { dataset } }) => {
      if (!held && matchMedia("(hover: hover)").matches) this.#select(text, dataset.index);
    });
    text.addEventListener("keydown", (event) => this.#onKey(event, text));
    this.#details = Object.assign(element("div", "alternatives"), { role: "status" });
    this.#view.append(text, this.#details);
    this.#fill(text, this.#view);
    this.#select(text, 0);
    return this.#view;
  }

  close() {
    this.#view?.remove();
    this.#view = null;
    this.#nodes = [];
  }

  /** Adds blocks of tokens for as long as a frame has time for it, and goes on in the next one. */
  #fill(text, view) {
    if (view !== this.#view) return; // it was closed
    const begin = performance.now();
    while (this.#nodes.length < this.length && performance.now() - begin < BUDGET_MS)
      text.append(this.#nextBlock());
    if (this.#nodes.length < this.length) requestAnimationFrame(() => this.#fill(text, view));
  }

  #nextBlock() {
    const block = element("div", this.length > LONGEST ? "final" : "");
    for (let isWhole = false; !isWhole && this.#nodes.length < this.length;) {
      const token = this.#at(this.#nodes.length);
      this.#nodes.push(block.appendChild(this.#token(token, this.#nodes.length)));
      const { length } = block.children;
      isWhole = length >= LONGEST || (length >= BLOCK && token.text.endsWith("\n"));
    }
    return block;
  }

  #token({ text, logprob }, index) {
    const node = element("span", "token", text);
    node.dataset.index = index;
    node.dataset.level = LEVELS.filter((level) => Math.exp(logprob) < level).length;
    node.id = `token-${Math.random().toString(36).slice(2)}`;
    Object.assign(node, { role: "option", ariaSelected: "false" });
    return node;
  }

  #onKey(event, text) {
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (event.key === "Enter") this.#details.querySelector("button")?.focus();
    if (!move) return;
    event.preventDefault();
    const at = Number(text.querySelector("[aria-selected=true]")?.dataset.index ?? 0);
    this.#select(text, Math.min(this.length - 1, Math.max(0, at + move)));
  }

  #select(text, index) {
    const node = this.#nodes[index];
    if (!node) return;
    text.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    node.ariaSelected = "true";
    text.setAttribute("aria-activedescendant", node.id);
    this.#describe(this.#at(index), Number(index));
  }

  /** Lists the alternatives of a token: each goes on from there. */
  #describe(token, index) {
    const said = element("p", "", `Token ${index + 1}: “${visible(token.text)}” ${percent(token.logprob)}`);
    const list = element("ul");
    for (const other of token.top) {
      const goOn = tool(
        visible(other.text),
        () => this.#onAlternative(this.textWith(index, other)),
        `Go on with “${visible(other.text)}”`,
      );
      goOn.disabled = other.text === token.text;
      const bar = element("i");
      bar.style.width = `${100 * Math.exp(other.logprob)}%`;
      list.append(element("li", "", "", goOn, element("span", "quiet", percent(other.logprob)), bar));
    }
    const hint = "Click a token to hold it, an alternative to go on from it; the answer stays as a version.";
    this.#details.replaceChildren(said, list, element("p", "quiet", hint));
  }
}
