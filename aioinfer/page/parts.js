// Long blocks in parts: a list or a table of any length, a paragraph without end. Each part is parsed
// by itself, so that of a text that grows only the last part is rendered again.

export const PART = 25; // items of a list, rows of a table
const LONGEST = 4000; // characters of a paragraph after which a part ends
const SEARCHED = 1000; // characters behind these in which the end is sought

/**
 * Returns where the parts of a block begin in its source, but for the first one: more text behind them
 * changes nothing of that. `tokens` are the block's.
 */
export function borders(tokens, source) {
  const [{ type, map }] = tokens;
  if (type === "paragraph_open") return bordersOfText(source.trimEnd());
  let lines = []; // of items or rows
  if (type === "table_open") lines = Array.from({ length: map[1] - map[0] - 2 }, (_, row) => row + 2);
  else if (/^(bullet|ordered)_list_open$/.test(type)) {
    const items = tokens.filter((token) => token.type === "list_item_open" && token.level === 1);
    lines = items.map((item) => item.map[0] - map[0]);
  }
  return offsets(source, lines.filter((_, index) => index && index % PART === 0));
}

/** What stands before each part of a table, so that it is one: its head. */
export const headOf = ([{ type }], source) =>
  type === "table_open" ? source.slice(0, offsets(source, [2])[0]) : "";

/** Where lines of a text begin, counted from 0, in their order. */
function offsets(text, lines) {
  let [at, line] = [0, 0];
  return lines.map((wanted) => {
    for (; line < wanted; line++) at = text.indexOf("\n", at) + 1;
    return at;
  });
}

/**
 * A part of a paragraph ends with a sentence, or else with a word, and the next one begins with a
 * letter, so that it is a paragraph by itself.
 */
function bordersOfText(text) {
  const found = [];
  for (let from = LONGEST; text.length > from + SEARCHED; from = found.at(-1) + LONGEST) {
    const sought = text.slice(from, from + SEARCHED);
    const end = /[.!?]\s+(?=\p{L})|[。！？](?=\p{L})/u.exec(sought) ?? /\s(?=\p{L})/u.exec(sought);
    if (!end) break;
    found.push(from + end.index + end[0].length);
  }
  return found;
}

/** The widths of a table's columns; its further parts have the same. */
export const widthsOf = (table) =>
  [...table.querySelectorAll("th")].map((cell) => cell.getBoundingClientRect().width);

/** Gives a table's columns these widths. */
export function setWidths(table, widths) {
  table.firstChild.style.width = `${widths.reduce((sum, width) => sum + width, 0)}px`;
  for (const [index, cell] of [...table.querySelectorAll("th")].entries())
    cell.style.width = `${widths[index]}px`;
}
