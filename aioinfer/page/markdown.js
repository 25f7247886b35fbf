// Markdown as DOM nodes, rendered while it comes: the vendored parser makes tokens, `blocks` makes nodes
// of them, and `parts` divides what is long.

import { build, morph } from "./blocks.js";
import { highlight } from "./highlight.js";
import { addMaths } from "./maths.js";
import { borders, headOf, PART, setWidths, widthsOf } from "./parts.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

// times the duration of a rendering, before the next one: at most a fifth of the time goes into it
const PAUSE = 4;
const MOST = 1000; // characters of a rendering: more may have come at once, or to a hidden tab
const LONG_MS = 8; // of a rendering, after which the next one takes fewer
const NEAR = 4; // the last blocks are near the screen: to skip one is to lay it out once more

const parser = new MarkdownIt({ html: false, breaks: true, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "page.js" is no address
addMaths(parser);

/**
 * Shows a Markdown text that grows.
 *
 * Text that is appended is rendered in the next animation frame, with all that came meanwhile.
 * Blocks (paragraphs, parts of lists, ...) that no further text can change are final: they are parsed
 * once and their nodes stay. Only what follows them is rendered again, and the longer that takes, the
 * longer is the pause before the next rendering.
 */
export class MarkdownView {
  text = "";
  #container;
  #around;
  #waiting = ""; // what was appended and is not rendered yet
  #rest = ""; // the text behind the final blocks, as far as it is rendered
  #nodes = []; // of that text, one for each block
  #part = null; // what `partsOf` says of the first of these blocks
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
    this.#most = Math.min(MOST, Math.max(200, this.#most * (duration > LONG_MS ? 0.5 : 2)));
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
    this.#resolve();
    conclude(this.#nodes);
    if (/#|^\s*[=-]+\s*$/m.test(this.text)) levelHeadings(this.#container);
  }

  #resolve() {
    if (!this.text.includes("]:")) return;
    const { blocks, references } = parse(this.text.replace(/\r\n?/g, "\n"));
    if (!Object.keys(references).length) return;
    this.#around(() => {
      this.#container.replaceChildren();
      this.#nodes = [];
      this.#show(blocks);
    });
  }

  #update() {
    // a CR at the end may be half of a line break
    this.#rest = this.#rest.replace(/\r\n|\r(?!$)/g, "\n");
    const { blocks } = parse(this.#rest, this.#references, this.#part);
    this.#show(blocks);
    this.#settle(blocks);
    for (const node of this.#nodes) colour([...node.querySelectorAll(".code")].slice(0, -1));
  }

  /** Makes the nodes what `blocks` are. */
  #show(blocks) {
    const old = this.#nodes;
    this.#nodes = [];
    for (const [index, { tokens, part }] of blocks.entries()) {
      const fresh = build(tokens);
      if (part) fresh.classList.add("further");
      if (part?.head) {
        part.widths ??= blocks[index - 1].part?.widths ?? widthsOf(this.#nodes[index - 1]);
        setWidths(fresh, part.widths);
      }
      if (!old[index]) this.#container.append(fresh);
      this.#nodes.push(old[index] ? morph(old[index], fresh) : fresh);
    }
    for (const node of old.slice(blocks.length)) node.remove();
  }

  /**
   * Makes all blocks final but the last: the first line of the block that follows shows that a
   * block has ended.
   */
  #settle(blocks) {
    let last = blocks.length - 1;
    if (last < 1) return;
    const isText = blocks[last].part && blocks[last].tokens[0].type === "paragraph_open";
    // "2" may yet become "2. item"
    if (!isText && !this.#rest.includes("\n", blocks[last].start)) last--;
    if (last < 1) return;
    const { start, part } = blocks[last];
    const final = this.#rest.slice(0, start);
    if (final.includes("]:")) this.#references = parse(final, this.#references).references;
    this.#rest = (part?.head ?? "") + this.#rest.slice(start);
    this.#part = part;
    conclude(this.#nodes.splice(0, last));
  }
}

/**
 * Returns the blocks of a text, `[{ start, tokens, part }]` (`start`: where the block begins), and its
 * link definitions. `part` is what `partsOf` has said of the first block.
 */
function parse(text, known = {}, part = null) {
  const references = { ...known };
  const found = [];
  let [line, start] = [0, 0];
  for (const token of parser.parse(text, { references })) {
    if (token.level === 0 && token.nesting >= 0) {
      for (; line < token.map[0]; line++) start = text.indexOf("\n", start) + 1;
      found.push({ start, tokens: [], part: found.length ? null : part });
    }
    found.at(-1).tokens.push(token);
  }
  const blocks = found.flatMap((block, index) =>
    partsOf(block, text.slice(block.start, found[index + 1]?.start), references),
  );
  return { blocks, references };
}

/**
 * Returns the parts of a block, each a block of its own. `part` of all but the first part says how it
 * goes on with the one before: `{ head, number }`, the text to be parsed before it, and the number of
 * its first item.
 */
function partsOf(block, source, references) {
  const { tokens: [first], part } = block;
  const number = part?.number ?? Number(first.attrGet("start") ?? 1);
  if (part) first.attrSet("start", number);
  const ends = borders(block.tokens, source);
  if (!ends.length) return [block];
  const head = headOf(block.tokens, source);
  return [0, ...ends].map((begin, index) => {
    const piece = (index ? head : "") + source.slice(begin, ends[index]);
    const tokens = parser.parse(piece, { references });
    const further = { head, number: number + index * PART };
    tokens[0].attrSet("start", further.number);
    return { start: block.start + begin, tokens, part: index ? further : part };
  });
}

/** Completes blocks that are final: far from the screen they are neither laid out nor painted. */
function conclude(nodes) {
  for (const node of nodes) {
    colour([node, ...node.querySelectorAll(".code")]);
    let before = node;
    for (let count = 0; count < NEAR; count++) before = before?.previousElementSibling;
    before?.classList.add("final");
  }
}

/** Colours those of the elements that are blocks of code. */
function colour(nodes) {
  for (const node of nodes)
    if (node.className === "code")
      highlight(node.querySelector("code"), node.querySelector(".language").textContent.toLowerCase());
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
