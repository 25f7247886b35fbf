// Formulas in Markdown: `\(...\)`, `$...$` in a line; `\[...\]`, `$$...$$` also over several lines.
// KaTeX makes elements of them. It is loaded with the first formula; until then, and where a formula
// cannot be read, its source is shown.

import { element } from "./elements.js";

const MAX_LENGTH = 20_000; // of a formula that is rendered
const MOST_KEPT = 200; // rendered formulas
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 };
const INLINE = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true], ["$", "$", false]];

let katex = null; // once it is loaded
let loading = null;
const rendered = new Map(); // by their source: a list that grows shows each many times

/** Teaches a `MarkdownIt` parser formulas: tokens of the type "math". */
export function addMaths(parser) {
  parser.inline.ruler.before("escape", "math", inlineRule);
  parser.block.ruler.before("fence", "math_block", blockRule, { alt: ["paragraph", "list"] });
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  for (const [open, close, isDisplay] of INLINE) {
    if (!src.startsWith(open, pos)) continue;
    const begin = pos + open.length;
    const end = closing(src, begin, close, state.posMax);
    if (end < 0 || (open === "$" && !isFormula(src, begin, end))) continue;
    if (!silent) push(state, src.slice(begin, end), isDisplay);
    state.pos = end + close.length;
    return true;
  }
  return false;
}

/** Where a formula closes, -1 if it does not: a delimiter behind a backslash is part of it. */
function closing(src, begin, close, limit) {
  for (let at = begin; ; at++) {
    at = src.indexOf(close, at);
    if (at < 0 || at + close.length > limit) return -1;
    if (at > begin && !(close[0] === "$" && src[at - 1] === "\\")) return at;
  }
}

/** Whether what stands between two single `$` is a formula, and not two prices (pandoc's rule). */
function isFormula(src, begin, end) {
  const isTight = !/\s/.test(src[begin]) && !/\s/.test(src[end - 1]);
  return isTight && !/\d/.test(src[end + 1] ?? "") && !src.slice(begin, end).includes("\n\n");
}

/** A formula that begins and ends its lines. */
function blockRule(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  const [open, close] = INLINE.slice(1, 3).find(([mark]) => state.src.startsWith(mark, begin)) ?? [];
  if (!open) return false;
  let line = startLine;
  let end = -1;
  for (; line < endLine; line++) {
    if (line > startLine && state.isEmpty(line)) return false;
    const from = line === startLine ? begin + open.length : state.bMarks[line];
    end = state.src.indexOf(close, from);
    if (end >= 0 && end < state.eMarks[line]) break;
    end = -1;
  }
  if (end < 0 || state.src.slice(end + close.length, state.eMarks[line]).trim()) return false;
  if (silent) return true;
  const token = push(state, state.src.slice(begin + open.length, end), true);
  token.block = true;
  token.map = [startLine, line + 1];
  state.line = line + 1;
  return true;
}

function push(state, source, isDisplay) {
  const token = state.push("math", isDisplay ? "div" : "span", 0);
  token.content = source;
  token.meta = { isDisplay };
  return token;
}

/** Makes the node of a formula. */
export function formula({ content, meta: { isDisplay } }) {
  const known = rendered.get(`${isDisplay} ${content}`);
  if (known) return known.cloneNode(true);
  const node = element("span", isDisplay ? "math display" : "math", content);
  if (isDisplay) node.tabIndex = 0; // to be scrolled by keyboard
  if (content.length > MAX_LENGTH) return node;
  if (katex) show(node, content, isDisplay);
  else (loading ??= load()).then(() => katex && show(node, content, isDisplay));
  return node;
}

function show(node, source, isDisplay) {
  try {
    katex.render(source.trim(), node, { ...OPTIONS, displayMode: isDisplay });
    if (rendered.size > MOST_KEPT) rendered.clear();
    rendered.set(`${isDisplay} ${source}`, node.cloneNode(true));
  } catch {
    node.textContent = source; // it cannot be read, or not yet: its source stays
    node.classList.add("unread");
  }
}

async function load() {
  const href = new URL("./vendor/katex.min.css", import.meta.url).href;
  document.head.append(Object.assign(element("link"), { rel: "stylesheet", href }));
  try {
    await import("./vendor/katex.min.js"); // a script that adds a global
    katex = globalThis.katex;
  } catch {
    // the sources of formulas stay
  }
}
