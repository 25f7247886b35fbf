// The last block of a text that grows, where it is a list or a table of any length: its first items or
// rows no longer change, and only the others are parsed and rendered again.

import { build } from "./blocks.js";

// items of a part: what is far from the screen is neither laid out nor painted, part by part
const PART = 25;
export const NEAR = 4; // the last parts are near the screen: to skip one is to lay it out once more

const isOfItem = ({ type, level }) => type === "paragraph_open" && level === 2;

/** Whether a block is a list whose items have paragraphs. */
export const isLoose = ({ tokens }) => tokens.some((token) => isOfItem(token) && !token.hidden);

/**
 * A list or a table whose first items (rows) are final. Their source has been taken from the text;
 * what is parsed begins with `head`, which is what a table's rows need before them, and goes on with
 * the first item (row) that is not final.
 *
 * A list is loose (its items have paragraphs) if there is a blank line anywhere between two of its
 * items. Where it has been shown otherwise than it turns out to be, it is rendered again as a whole,
 * from `source`.
 */
export class Grown {
  head = "";
  source = ""; // of the final items, and what stands before them
  before = []; // the parts that are final
  node; // the last part
  #items; // the element that has the items
  #open = []; // the items that are shown and not final
  #isLoose; // whether the final items are shown with paragraphs
  #isKnownLoose = false; // whether there is a blank line between two of the final items

  /** `node` shows `block`, of which nothing is final yet. */
  constructor(node, block) {
    this.node = node;
    this.#items = itemsOf(node);
    this.#open = [...this.#items.children];
    this.#isLoose = isLoose(block);
  }

  /** Whether `block` can be shown behind the final items, as they are shown. */
  fits(block) {
    return this.#isLoose || !isLoose(block);
  }

  /** Removes the parts before the last, where the block is to be rendered as a whole. */
  removeBefore() {
    for (const part of this.before) part.remove();
  }

  /**
   * Whether it is known without parsing the whole list that the final items are shown as they have
   * to be, with those of `block` behind them; without paragraphs `block` says nothing of that.
   */
  isKnownRight(block) {
    const tells = this.#isKnownLoose || block.tokens.some(isOfItem);
    return Boolean(this.head) || (tells && this.#isLoose === (this.#isKnownLoose || isLoose(block)));
  }

  /** Whether the final items are shown as they are in the whole block. */
  isRight(whole) {
    return this.#isLoose === isLoose(whole);
  }

  /** Notes what `block` shows of the final items: they and the next one are all that it has. */
  note(block) {
    this.#isKnownLoose ||= isLoose(block);
  }

  /**
   * Shows the items of `block` behind the final ones; `replace(old, fresh, container)` puts one in
   * the place of another and returns what is there then. Returns the last part.
   */
  show({ tokens }, replace) {
    const isShown = ({ type, level }) => level === 2 && type.startsWith("paragraph_");
    if (this.#isLoose) for (const token of tokens.filter(isShown)) token.hidden = false;
    const fresh = build(tokens);
    const items = [...(fresh.matches(".table") ? fresh.querySelectorAll("tbody > tr") : fresh.children)];
    const old = this.#open;
    this.#open = items.map((item, index) => replace(old[index], item, this.#items));
    old.slice(items.length).forEach((item) => item.remove());
    return this.node;
  }

  /**
   * Makes the first `count` items final that are not yet; `text` is their source, with `head`.
   * Returns their nodes.
   */
  settle(count, text) {
    this.source += text.slice(this.source ? this.head.length : 0);
    const final = this.#open.splice(0, count);
    if (this.#items.children.length - this.#open.length >= PART) {
      this.before.push(this.node);
      this.before.at(-NEAR)?.classList.add("final");
      this.node = nextPart(this.node, this.#open);
      this.#items = itemsOf(this.node);
    }
    return final;
  }
}

/** The element that has the items of a list or the rows of a table. */
const itemsOf = (node) => (node.matches(".table") ? node.querySelector("tbody") : node);

/** Makes a part final and begins the next one, with items that stood in it; returns it. */
function nextPart(node, moved) {
  const next = node.matches(".table") ? nextTable(node) : node.cloneNode(false);
  if (next.tagName === "OL") next.start = node.start + node.children.length - moved.length;
  itemsOf(next).append(...moved);
  node.classList.add("more");
  node.after(next);
  return next;
}

/**
 * Makes the next part of a table: with the head, which is read aloud with each cell, and the widths
 * of the columns so far.
 */
function nextTable(node) {
  const [table] = node.children;
  const cells = [...table.tHead.rows[0].cells];
  const widths = cells.map((cell) => cell.getBoundingClientRect().width);
  const next = node.cloneNode(false);
  next.append(table.cloneNode(false));
  next.firstChild.append(table.tHead.cloneNode(true), document.createElement("tbody"));
  next.firstChild.style.width = `${widths.reduce((sum, width) => sum + width, 0)}px`;
  for (const [index, cell] of [...next.querySelectorAll("th")].entries())
    cell.style.width = `${widths[index]}px`;
  return next;
}

/** Divides the long lists among the blocks of a text that came as a whole. */
export function divide(container) {
  for (const list of [...container.children].filter((node) => node.matches("ul, ol")))
    for (let part = list; part.children.length > 2 * PART;)
      part = nextPart(part, [...part.children].slice(PART));
}

/**
 * Returns what of a block, the last of a text, can be made final: `{ count, head, text }`; `text` is
 * the source of the first `count` items with `head`. Returns null if nothing can. `rest` is the text
 * from the block on.
 */
export function finalPart({ tokens }, rest) {
  if (tokens[0].type === "table_open") return finalRows(tokens[0], rest);
  const isList = tokens[0].type === "bullet_list_open" || tokens[0].type === "ordered_list_open";
  return isList ? finalItems(tokens, rest) : null;
}

/** All rows but the last: a line shows that the one before has ended. */
function finalRows({ map: [first, last] }, rest) {
  const count = last - first - 3; // without the two lines of the head
  if (count < 1) return null;
  const head = rest.slice(0, lineStart(rest, 2));
  return { count, head, text: rest.slice(0, lineStart(rest, count + 2)) };
}

/** All items but the last, which has a whole line: "2" may yet become the text of the item before. */
function finalItems(tokens, rest) {
  const [first] = tokens[0].map;
  const items = [];
  for (const [index, { type, level, map }] of tokens.entries()) {
    if (type !== "list_item_open" || level !== 1) continue;
    items.push(map[0] - first);
    // only a paragraph tells whether the list is loose
    if (tokens[index + 1].type !== "paragraph_open") break;
  }
  while (items.length > 1 && !rest.includes("\n", lineStart(rest, items.at(-1)))) items.pop();
  if (items.length < 2) return null;
  const text = rest.slice(0, lineStart(rest, items.at(-1)));
  return { count: items.length - 1, head: "", text };
}

/** Where a line begins, counted from 0. */
function lineStart(text, line) {
  let at = 0;
  for (; line > 0; line--) at = text.indexOf("\n", at) + 1;
  return at;
}
