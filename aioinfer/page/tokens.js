// The tokens of an answer by their probability, with the likeliest alternatives of each: what the
// model hesitated about, and how it would have gone on.

import { button, element } from "./elements.js";

const LEVELS = [0.9, 0.7, 0.4, 0.15]; // probabilities at which the colour changes

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -4.6 ? 1 : 3)} %`;
const visible = (text) => text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "∅";

/** The tokens of one answer. */
export class Tokens {
  #view = null;
  #details = null;
  #onAlternative = null;

  /** `list`: tokens that were kept, `[{ text, bytes, logprob, top: [{ text, bytes, logprob }] }]`. */
  constructor(list = []) {
    this.list = [...list];
  }

  /** Takes the `logprobs.content` of an event, if there is any. */
  take(content) {
    for (const { token, bytes, logprob, top_logprobs: top } of content ?? []) {
      const others = (top ?? []).map((each) => ({
        text: each.token,
        bytes: each.bytes,
        logprob: each.logprob,
      }));
      this.list.push({ text: token, bytes, logprob, top: others });
    }
  }

  /** Returns the text of the tokens before `index`, followed by another one. */
  textWith(index, alternative) {
    const pieces = [...this.list.slice(0, index), alternative];
    const bytes = pieces.flatMap(({ text, bytes: own }) => own ?? [...new TextEncoder().encode(text)]);
    return new TextDecoder().decode(new Uint8Array(bytes));
  }

  /** Returns the view; `onAlternative(text)` hears of the text that is to be gone on from. */
  view(onAlternative) {
    this.close();
    this.#onAlternative = onAlternative;
    this.#view = element("div", "tokens");
    const text = element("div", "token-text");
    text.tabIndex = 0;
    text.setAttribute("role", "listbox");
    text.ariaLabel = "Tokens, the less likely the darker; arrow keys move, Enter shows alternatives";
    this.list.forEach((token, index) => text.append(this.#token(token, index)));
    text.addEventListener("click", ({ target }) => this.#select(text, target.dataset.index));
    text.addEventListener("pointerover", ({ target }) => {
      if (target.dataset.index && matchMedia("(hover: hover)").matches)
        this.#select(text, target.dataset.index);
    });
    text.addEventListener("keydown", (event) => this.#onKey(event, text));
    this.#details = element("div", "alternatives");
    this.#details.setAttribute("role", "status");
    this.#view.append(text, this.#details);
    this.#select(text, 0);
    return this.#view;
  }

  close() {
    this.#view?.remove();
    this.#view = null;
  }

  #token({ text, logprob }, index) {
    const node = element("span", "token", text);
    node.dataset.index = index;
    node.dataset.level = LEVELS.filter((level) => Math.exp(logprob) < level).length;
    node.id = `token-${Math.random().toString(36).slice(2)}`;
    node.setAttribute("role", "option");
    node.ariaSelected = "false";
    return node;
  }

  #onKey(event, text) {
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (event.key === "Enter") this.#details.querySelector("button")?.focus();
    if (!move) return;
    event.preventDefault();
    const at = Number(text.querySelector("[aria-selected=true]")?.dataset.index ?? 0);
    this.#select(text, Math.min(this.list.length - 1, Math.max(0, at + move)));
  }

  #select(text, index) {
    if (index === undefined || !this.list[index]) return;
    text.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const node = text.children[index];
    node.ariaSelected = "true";
    text.setAttribute("aria-activedescendant", node.id);
    this.#describe(this.list[index], Number(index));
  }

  /** Lists the alternatives of a token: each goes on from there. */
  #describe(token, index) {
    const said = element("p", "", `Token ${index + 1}: “${visible(token.text)}” ${percent(token.logprob)}`);
    const list = element("ul", "");
    for (const other of token.top) {
      const item = document.createElement("li");
      const isTaken = other.text === token.text;
      const goOn = button("tool", visible(other.text));
      goOn.ariaLabel = `Go on with “${visible(other.text)}”`;
      goOn.disabled = isTaken;
      goOn.addEventListener("click", () => this.#onAlternative(this.textWith(index, other)));
      const bar = element("i", "");
      bar.style.width = `${100 * Math.exp(other.logprob)}%`;
      item.append(goOn, element("span", "quiet", percent(other.logprob)), bar);
      list.append(item);
    }
    const hint = "Choose an alternative to go on from it; the answer stays as a version.";
    this.#details.replaceChildren(said, list, element("p", "quiet", hint));
  }
}
