// Markdown as DOM nodes, rendered while it comes: the vendored parser makes tokens, `blocks` makes nodes
// of them.

import { build } from "./blocks.js";
import { highlight } from "./highlight.js";
import { addMaths } from "./maths.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

// times the duration of a rendering, before the next one: at most a fifth of the time goes into it
const PAUSE = 4;


const parser = new MarkdownIt({ html: false, breaks: true, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "page.js" is no address
addMaths(parser);

/**
 * Shows a Markdown text that grows.
 *
 * Text that is appended is rendered in the next animation frame, with all that came meanwhile.
 * Blocks (paragraphs, lists, ...) that no further text can change are final: they are parsed once
 * and their nodes stay. Only what follows them is rendered again, and the longer that takes, the
 * longer is the pause before the next rendering.
 */
export class MarkdownView {
  text = "";
  #container;
  #around;
  #rest = ""; // the text behind the final blocks
  #nodes = []; // of that text, one for each block
  #references = {}; // the link definitions of final blocks
  #timer = 0;
  #frame = 0;
  #pause = 0;

  /**
   * Renders into `container`. `around(render)` is called to render, for what has to be done before
   * and after.
   */
  constructor(container, around = (render) => render()) {
    this.#container = container;
    this.#around = around;
  }

  /** Appends text, to be rendered soon. */
  append(text) {
    this.text += text;
    this.#rest += text;
    if (this.#timer || this.#frame) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#frame = requestAnimationFrame(() => this.render());
    }, this.#pause);
  }

  /** Renders what was appended, now. */
  render() {
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
    this.#timer = this.#frame = 0;
    const begin = performance.now();
    this.#around(() => this.#update());
    this.#pause = PAUSE * (performance.now() - begin);
  }

  /**
   * Renders the text once it is complete: a link definition now counts for what stands before it,
   * too, and the levels of headings leave none out.
   */
  finish() {
    this.render();
    this.#resolve();
    levelHeadings(this.#container);
    colour(this.#container.children);
  }

  #resolve() {
    if (!this.text.includes("]:")) return;
    const { blocks, references } = parse(this.text.replace(/\r\n?/g, "\n"));
    if (!Object.keys(references).length) return;
    this.#around(() =>
      this.#container.replaceChildren(...blocks.map((block) => build(block.tokens))),
    );
  }

  #update() {
    // a CR at the end may be half of a line break
    this.#rest = this.#rest.replace(/\r\n|\r(?!$)/g, "\n");
    const { blocks } = parse(this.#rest, this.#references);
    const shown = blocks.map((block, index) =>
      replace(this.#nodes[index], build(block.tokens), this.#container),
    );
    this.#nodes.slice(blocks.length).forEach((node) => node.remove());
    this.#nodes = shown;
    this.#settle(blocks);
  }

  /**
   * Makes all blocks final but the last: the first line of the block that follows shows that a
   * block has ended.
   */
  #settle(blocks) {
    let last = blocks.length - 1;
    // "2" may yet become "2. item"
    if (last > 0 && !this.#rest.includes("\n", blocks[last].start)) last--;
    if (last < 1) return;
    const text = this.#rest.slice(0, blocks[last].start);
    if (text.includes("]:")) this.#references = parse(text, this.#references).references;
    this.#rest = this.#rest.slice(text.length);
    colour(this.#nodes.splice(0, last));
  }
}

/**
 * Returns the blocks of a text, `[{ start, tokens }]` (`start`: where the block's first line
 * begins), and its link definitions.
 */
function parse(text, known = {}) {
  const references = { ...known };
  const blocks = [];
  let line = 0;
  let start = 0;
  for (const token of parser.parse(text, { references })) {
    if (token.level === 0 && token.nesting >= 0) {
      for (; line < token.map[0]; line++) start = text.indexOf("\n", start) + 1;
      blocks.push({ start, tokens: [] });
    }
    blocks.at(-1).tokens.push(token);
  }
  return { blocks, references };
}

/**
 * Puts `fresh` into the place of `old`, or at the end if there is none; returns the node that is
 * there then.
 */
function replace(old, fresh, container) {
  if (!old) container.append(fresh);
  else if (old.isEqualNode(fresh) || extendCode(old, fresh)) return old;
  else old.replaceWith(fresh);
  return fresh;
}

/**
 * Appends what `fresh` has more of the same code than `old`, so that a selection and the focus
 * stay. Returns whether it could.
 */
function extendCode(old, fresh) {
  if (old.className !== "code" || fresh.className !== "code") return false;
  const [text, more] = [old, fresh].map((block) => block.querySelector("code").firstChild);
  const sameKind =
    old.querySelector(".language").textContent === fresh.querySelector(".language").textContent;
  if (!sameKind || !text || !more?.data.startsWith(text.data)) return false;
  text.appendData(more.data.slice(text.length));
  return true;
}

/** Colours the code in nodes that are final. */
function colour(nodes) {
  for (const node of nodes)
    for (const block of node.matches?.(".code") ? [node] : (node.querySelectorAll?.(".code") ?? []))
      highlight(block.querySelector("code"), block.querySelector(".language").textContent.toLowerCase());
}

/** Tells readers of headings the level of each: at most one more than that of the one before. */
function levelHeadings(container) {
  let last = 2; // the heading of the chat
  for (const heading of container.querySelectorAll("h3, h4, h5, h6")) {
    const own = Number(heading.tagName[1]);
    last = Math.min(own, last + 1);
    if (last < own) heading.ariaLevel = last;
  }
}
