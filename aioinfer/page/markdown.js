// Markdown as DOM nodes. The vendored parser makes tokens, of which only the elements listed here
// are made, and text only ever becomes text nodes: no string is ever read as HTML, so a model's
// output cannot bring elements, attributes or scripts of its own.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

/** The element for each tag of the parser; the page's own headings end at level 2. */
const ELEMENTS = {
  p: "p",
  h1: "h3",
  h2: "h4",
  h3: "h5",
  h4: "h6",
  h5: "h6",
  h6: "h6",
  blockquote: "blockquote",
  hr: "hr",
  br: "br",
  ul: "ul",
  ol: "ol",
  li: "li",
  strong: "strong",
  em: "em",
  s: "s",
  table: "table",
  thead: "thead",
  tbody: "tbody",
  tr: "tr",
  th: "th",
  td: "td",
};
const PROTOCOLS = ["http:", "https:", "mailto:"]; // of links
const COPIED_MS = 1500; // how long a button shows that it has copied
// times the duration of a rendering, before the next one: at most a fifth of the time goes into it
const PAUSE = 4;

const parser = new MarkdownIt({ html: false, breaks: true, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "page.js" is no address

/** Makes an element with a class and a text. */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Makes a button that submits nothing. */
export function button(className, text) {
  const made = element("button", className, text);
  made.type = "button";
  return made;
}

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
    this.#nodes.splice(0, last);
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

/** Tells readers of headings the level of each: at most one more than that of the one before. */
function levelHeadings(container) {
  let last = 2; // the heading of the chat
  for (const heading of container.querySelectorAll("h3, h4, h5, h6")) {
    const own = Number(heading.tagName[1]);
    last = Math.min(own, last + 1);
    if (last < own) heading.ariaLevel = last;
  }
}

/** Makes the node of a block. */
function build(tokens) {
  const root = document.createDocumentFragment();
  appendAll(root, tokens);
  return root.firstChild;
}

function appendAll(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraphs of a list without blank lines
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) {
      const made = makeElement(token);
      open.at(-1).append(made);
      open.push(made);
    } else appendLeaf(open.at(-1), token);
  }
}

/** Makes the element of a token that has others within it. */
function makeElement(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  const made = document.createElement(ELEMENTS[token.tag] ?? "span");
  if (token.tag === "ol") made.start = token.attrGet("start") ?? 1;
  const aligned = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (aligned) made.style.textAlign = aligned[1];
  return made;
}

function appendLeaf(parent, token) {
  switch (token.type) {
    case "inline":
      return appendAll(parent, token.children);
    case "softbreak":
    case "hardbreak":
    case "hr":
      return parent.append(document.createElement(ELEMENTS[token.tag]));
    case "code_inline":
      return parent.append(element("code", "", token.content));
    case "fence":
    case "code_block":
      return parent.append(codeBlock(token.content, token.info.trim().split(/\s/)[0]));
    case "image": {
      // never loaded: whoever reads decides whether to follow it
      const made = parent.closest?.("a")
        ? document.createElement("span")
        : link(token.attrGet("src"));
      made.append(token.content || "image");
      return parent.append(made);
    }
    default:
      return parent.append(token.content);
  }
}

/**
 * Makes a link that opens beside the page, or a span where the address is of no kind that is
 * allowed.
 */
function link(address) {
  if (!PROTOCOLS.includes(URL.canParse(address) && new URL(address).protocol))
    return document.createElement("span");
  const made = document.createElement("a");
  made.href = made.title = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

/** Makes a block of code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const block = element("div", "code");
  const bar = element("div", "code-bar");
  const copies = button("copy", "Copy");
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // to be scrolled by keyboard
  pre.append(element("code", "", text));
  copies.addEventListener("click", () => copy(copies, pre.firstChild));
  bar.append(element("span", "language", language), copies);
  block.append(bar, pre);
  return block;
}

async function copy(pressed, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    pressed.textContent = "Copied";
  } catch {
    // without HTTPS browsers have no clipboard for pages: one key is left to press
    getSelection().selectAllChildren(code);
    pressed.textContent = "Selected";
  }
  setTimeout(() => (pressed.textContent = "Copy"), COPIED_MS);
}
