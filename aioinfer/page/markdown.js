// Markdown as DOM nodes, rendered while it comes: the vendored parser makes tokens, `blocks` makes nodes
// of them.

import { build } from "./blocks.js";
import { divide, finalPart, Grown, isLoose, NEAR } from "./grown.js";
import { highlight } from "./highlight.js";
import { addMaths } from "./maths.js";
import { divideParagraphs } from "./paragraphs.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

// times the duration of a rendering, before the next one: at most a fifth of the time goes into it
const PAUSE = 4;
const MOST = 1000; // characters of a rendering: more may have come at once, or to a hidden tab
const LONG_MS = 12; // of a rendering, after which the next one takes fewer

const parser = new MarkdownIt({ html: false, breaks: true, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "page.js" is no address
addMaths(parser);
divideParagraphs(parser);

/**
 * Shows a Markdown text that grows.
 *
 * Text that is appended is rendered in the next animation frame, with all that came meanwhile.
 * Blocks (paragraphs, lists, ...) that no further text can change are final: they are parsed once
 * and their nodes stay. Only what follows them is rendered again, and the longer that takes, the
 * longer is the pause before the next rendering. Of a list or a table the first items are final,
 * too (`Grown`).
 */
export class MarkdownView {
  text = "";
  #container;
  #around;
  #waiting = ""; // what was appended and is not rendered yet
  #rest = ""; // the text behind the final blocks, as far as it is rendered
  #nodes = []; // of that text, one for each block
  #grown = null; // the first of these blocks, where a part of it is final
  #references = {}; // the link definitions of final blocks
  #timer = 0;
  #frame = 0;
  #pause = 0;
  #most = MOST;

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
    this.#waiting += text;
    this.#renderSoon();
  }

  #renderSoon() {
    if (this.#timer || this.#frame) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#frame = requestAnimationFrame(() => this.render());
    }, this.#pause);
  }

  /** Renders what was appended, now: at most so many characters, and the others soon. */
  render(most = this.#most) {
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
    this.#timer = this.#frame = 0;
    const begin = performance.now();
    this.#rest += this.#waiting.slice(0, most);
    this.#waiting = this.#waiting.slice(most);
    this.#around(() => this.#update());
    const duration = performance.now() - begin;
    this.#pause = PAUSE * duration;
    this.#most = Math.min(MOST, Math.max(50, this.#most * (duration > LONG_MS ? 0.5 : 2)));
    if (this.#waiting) this.#renderSoon();
  }

  /** Resolves once all that came is rendered; at once in a hidden tab, which has no frames. */
  async drain() {
    while (this.#waiting && !document.hidden) {
      this.#pause = 0;
      await new Promise((wake) => setTimeout(wake, LONG_MS));
    }
  }

  /**
   * Renders the text once it is complete: a link definition now counts for what stands before it,
   * too, and the levels of headings leave none out.
   */
  finish() {
    this.render(Infinity);
    this.#completeGrown();
    this.#resolve();
    if (/#|^\s*[=-]+\s*$/m.test(this.text)) levelHeadings(this.#container);
    divide(this.#container);
    // to skip a part that is near the screen is to lay it out once more
    const nodes = [...this.#container.children];
    const near = nodes.slice(-NEAR).filter((node) => node.matches(".more, .more + *"));
    colour(near);
    conclude(nodes.filter((node) => !node.matches(".final") && !near.includes(node)));
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
    let { blocks } = parse(this.#rest, this.#references);
    if (this.#grown && !this.#grown.fits(blocks[0])) {
      this.#rest = this.#wholeSource(this.#rest);
      this.#grown.removeBefore();
      this.#grown = null;
      ({ blocks } = parse(this.#rest, this.#references));
    }
    const shown = blocks.map((block, index) =>
      index === 0 && this.#grown
        ? this.#grown.show(block, replace)
        : replace(this.#nodes[index], build(block.tokens), this.#container),
    );
    this.#nodes.slice(blocks.length).forEach((node) => node.remove());
    this.#nodes = shown;
    this.#settle(blocks);
    this.#settlePart(blocks.at(-1));
  }

  /**
   * Makes all blocks final but the last: the first line of the block that follows shows that a
   * block has ended.
   */
  #settle(blocks) {
    let last = blocks.length - 1;
    if (last < 1) return;
    const { start, isDivided } = blocks[last];
    // "2" may yet become "2. item"
    if (!isDivided && !this.#rest.includes("\n", start)) last--;
    if (last < 1) return;
    this.#completeGrown(blocks[1].start);
    this.#define(this.#rest.slice(0, blocks[last].start));
    this.#rest = this.#rest.slice(blocks[last].start);
    conclude(this.#nodes.splice(0, last));
  }

  /** Makes the first items final of a list or a table that is the only block which is not. */
  #settlePart(block) {
    if (this.#nodes.length !== 1) return;
    // blank lines may stand before a text's first block
    if (!this.#grown) this.#rest = this.#rest.replace(/^(?:[ \t]*\n)+/, "");
    const part = finalPart(block, this.#rest);
    if (!part) return;
    this.#grown ??= new Grown(this.#nodes[0], block);
    this.#grown.head = part.head;
    if (isLoose(block)) {
      // what follows the first line of the next item may yet change
      const end = this.#rest.indexOf("\n", part.text.length) + 1;
      this.#grown.note(parse(this.#rest.slice(0, end), this.#references).blocks[0]);
    }
    this.#define(part.text);
    this.#rest = part.head + this.#rest.slice(part.text.length);
    colour(this.#grown.settle(part.count, part.text));
    this.#nodes = [this.#grown.node];
  }

  /** Renders a list as a whole that was not shown as it has to be; it ends at `end`. */
  #completeGrown(end) {
    if (!this.#grown) return;
    const rest = this.#rest.slice(0, end);
    if (!this.#grown.isKnownRight(parse(rest, this.#references).blocks[0])) this.#checkGrown(rest);
    this.#grown = null;
  }

  #checkGrown(rest) {
    const [whole] = parse(this.#wholeSource(rest), this.#references).blocks;
    if (this.#grown.isRight(whole)) return;
    this.#grown.removeBefore();
    this.#nodes[0] = replace(this.#nodes[0], build(whole.tokens), this.#container);
  }

  /** The source of the block that `rest` goes on with. */
  #wholeSource(rest) {
    return this.#grown.source + rest.slice(this.#grown.head.length);
  }

  /** Takes the link definitions of a text that is final. */
  #define(text) {
    if (text.includes("]:")) this.#references = parse(text, this.#references).references;
  }
}

/**
 * Returns the blocks of a text, `[{ start, tokens, isDivided }]` (`start`: where the block begins;
 * `isDivided`: within a paragraph), and its link definitions.
 */
function parse(text, known = {}) {
  const references = { ...known };
  const blocks = [];
  let line = 0;
  let start = 0;
  for (const token of parser.parse(text, { references })) {
    if (token.level === 0 && token.nesting >= 0) {
      for (; line < token.map[0]; line++) start = text.indexOf("\n", start) + 1;
      const { offset } = token.meta ?? {};
      const begin = offset ? start + offset + text.slice(start).search(/\S/) : start;
      blocks.push({ start: begin, tokens: [], isDivided: Boolean(offset) });
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

/** Completes blocks that are final: far from the screen they are neither laid out nor painted. */
function conclude(nodes) {
  for (const node of nodes) node.classList.add("final");
  colour(nodes);
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
