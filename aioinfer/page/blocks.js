// The nodes of Markdown's blocks. Only the elements listed here are made, and text only ever becomes
// text nodes: no string is ever read as HTML, so a model's output cannot bring elements, attributes or
// scripts of its own.

import { element } from "./elements.js";
import { formula } from "./maths.js";
import { codeBlock } from "./menu.js";

/** The elements that are made; the page's own headings end at level 2. */
const ELEMENTS = "p h3 h4 h5 h6 blockquote hr br ul ol li strong em s table thead tbody tr th td".split(" ");
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" };

/** The element for a tag of the parser. */
function elementFor({ tag }) {
  const name = HEADINGS[tag] ?? tag;
  return document.createElement(ELEMENTS.includes(name) ? name : "span");
}

const PROTOCOLS = ["http:", "https:", "mailto:"]; // of links

/** Makes the node of a block from its tokens. */
export function build(tokens) {
  const root = document.createDocumentFragment();
  appendAll(root, tokens);
  return root.firstChild;
}

function appendAll(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraphs of a list without blank lines
    if (token.nesting < 0) close(open.pop());
    else if (token.nesting > 0) {
      const made = makeElement(token);
      open.at(-1).append(made);
      open.push(made);
    } else appendLeaf(open.at(-1), token);
  }
}

/** Completes an element that has all of its content. */
function close(made) {
  if (made.tagName === "LI") checkTask(made);
  if (made.tagName !== "TABLE") return;
  const frame = element("div", "table");
  frame.tabIndex = 0; // to be scrolled by keyboard
  made.replaceWith(frame);
  frame.append(made);
}

/** Makes a box of the `[ ]` or `[x]` that an item of a list begins with. */
function checkTask(item) {
  const { firstChild: first } = item;
  const text = first?.tagName === "P" ? first.firstChild : first;
  const mark = /^\[([ xX])\]\s/.exec(text?.data);
  if (!mark) return;
  text.deleteData(0, mark[0].length);
  const isDone = mark[1] !== " ";
  const box = element("input");
  Object.assign(box, { type: "checkbox", disabled: true, defaultChecked: isDone });
  box.ariaLabel = isDone ? "done" : "to do";
  text.before(box);
  item.classList.add("task");
}

/** Makes the element of a token that has others within it. */
function makeElement(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  const made = elementFor(token);
  if (token.level === 0) made.dir = "auto"; // a list and a table as their first letters are
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
      return parent.append(elementFor(token));
    case "math":
      return parent.append(formula(token));
    case "code_inline":
      return parent.append(element("code", "", token.content));
    case "fence":
    case "code_block":
      return parent.append(codeBlock(token.content, token.info.trim().split(/\s/)[0]));
    case "image": {
      // never loaded: whoever reads decides whether to follow it
      const made = parent.closest?.("a") ? element("span") : link(token.attrGet("src"));
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
    return element("span");
  const rel = "noopener noreferrer";
  return Object.assign(element("a"), { href: address, title: address, target: "_blank", rel });
}

/**
 * Makes `old` what `fresh` is; what both have stays, so that a selection and the focus do. Returns the
 * node that is there then.
 */
export function morph(old, fresh) {
  // code that is coloured has other nodes for the same text
  const isSameCode = old.className === "code" && old.textContent === fresh.textContent;
  if (isSameCode || old.isEqualNode(fresh)) return old;
  if (old.nodeType === Node.TEXT_NODE && fresh.data?.startsWith(old.data))
    old.appendData(fresh.data.slice(old.length));
  else if (!fresh.firstChild || !old.cloneNode(false).isEqualNode(fresh.cloneNode(false))) {
    old.replaceWith(fresh);
    return fresh;
  } else {
    const [kept, made] = [[...old.childNodes], [...fresh.childNodes]];
    for (const [index, child] of made.entries())
      if (kept[index]) morph(kept[index], child);
      else old.append(child);
    for (const child of kept.slice(made.length)) child.remove();
  }
  return old;
}
