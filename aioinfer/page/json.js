// JSON as it is read by people: indented while it comes, and as it came on demand.

import { codeBlock, tool } from "./menu.js";

const MAX_DEPTH = 32; // of the indentation: a text of brackets alone must not grow by its square

/** Indents JSON that comes in pieces: what it has returned never changes. */
export class Indenter {
  #depth = 0;
  #isInText = false;
  #isEscaped = false;
  #hasOpened = false; // whether nothing stands behind the last bracket that opened yet

  /** Returns what a further piece adds to the indented text. */
  feed(piece) {
    let added = "";
    for (const character of piece) {
      added += this.#isInText ? this.#inText(character) : this.#outside(character);
    }
    return added;
  }

  #inText(character) {
    if (this.#isEscaped) this.#isEscaped = false;
    else if (character === "\\") this.#isEscaped = true;
    else if (character === '"') this.#isInText = false;
    return character;
  }

  #outside(character) {
    if (" \t\r\n".includes(character)) return "";
    const closes = "}]".includes(character);
    if (closes) this.#depth--;
    const before = this.#hasOpened === closes ? "" : this.#newLine(); // {} stays together
    this.#hasOpened = "{[".includes(character);
    if (this.#hasOpened) this.#depth++;
    this.#isInText = character === '"';
    const after = character === "," ? this.#newLine() : character === ":" ? " " : "";
    return before + character + after;
  }

  #newLine() {
    return `\n${"  ".repeat(Math.max(0, Math.min(this.#depth, MAX_DEPTH)))}`;
  }
}

/** Returns what a JSON text holds, undefined if it is none. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Shows a JSON text that grows, with a button that shows it as it came. */
export class JsonView {
  text = "";
  #indented = "";
  #isRaw = false;
  #indenter = new Indenter();
  #shown = document.createTextNode("");
  #switch = tool("Show raw", () => this.#show(!this.#isRaw));
  #block = null; // there is none as long as there is no text
  #container;
  #around;

  /** Takes what a `MarkdownView` does. */
  constructor(container, around = (render) => render()) {
    this.#container = container;
    this.#around = around;
  }

  append(text) {
    const added = this.#indenter.feed(text);
    this.text += text;
    this.#indented += added;
    this.#around(() => {
      if (!this.#block) this.#open();
      this.#shown.appendData(this.#isRaw ? text : added);
    });
  }

  finish() {
    if (!this.#block || parsed(this.text) !== undefined) return;
    this.#block.querySelector(".language").textContent = "JSON, not complete";
    if (!/^\s*[[{]/.test(this.text)) this.#show(true); // whatever it is, its spaces count
  }

  #open() {
    this.#block = codeBlock("", "JSON");
    this.#block.querySelector("code").append(this.#shown);
    this.#block.querySelector(".language").after(this.#switch);
    this.#container.append(this.#block);
  }

  #show(isRaw) {
    this.#isRaw = isRaw;
    this.#shown.data = isRaw ? this.text : this.#indented;
    this.#switch.textContent = isRaw ? "Show indented" : "Show raw";
    this.#block.classList.toggle("raw", isRaw);
  }
}
