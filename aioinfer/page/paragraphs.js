// Divides very long paragraphs: with each token that comes, only the last part is parsed again.

const LONGEST = 4000; // characters after which a part of a paragraph ends
const SEARCHED = 1000; // characters behind these in which the end is sought

/** Has a `MarkdownIt` parser divide long paragraphs: `meta.offset` is where in them a part begins. */
export function divideParagraphs(parser) {
  parser.core.ruler.after("block", "long_paragraphs", (state) => {
    state.tokens = state.tokens.flatMap((token, index) => {
      const before = state.tokens[index - 1];
      const isText = token.type === "inline" && before.type === "paragraph_open";
      return isText && before.level === 0 ? divided(token, before, state.tokens[index + 1]) : [token];
    });
  });
}

/** The text of a paragraph, with the tokens between its parts. */
function divided(inline, open, close) {
  const { content } = inline;
  const tokens = [];
  let begin = 0;
  let opened = open;
  for (let end = endOfPart(content, 0); end; end = endOfPart(content, begin)) {
    opened.meta = { ...opened.meta, goesOn: true };
    opened = copyOf(open, { meta: { offset: end } });
    const part = copyOf(inline, { content: content.slice(begin, end), children: [] });
    tokens.push(part, copyOf(close), opened);
    begin = end;
  }
  inline.content = content.slice(begin);
  return [...tokens, inline];
}

const copyOf = (token, more = {}) =>
  Object.assign(Object.create(Object.getPrototypeOf(token)), token, more);

/**
 * Where a part ends that begins at `begin`; 0 if it does not. More text behind it changes nothing: a
 * part ends with a sentence, or else with a word, and the next one begins with a letter, so that it
 * is no list by itself.
 */
function endOfPart(text, begin) {
  const from = begin + LONGEST;
  if (text.length <= from + SEARCHED) return 0;
  const sought = text.slice(from, from + SEARCHED);
  const found = /[.!?]\s+(?=\p{L})|[。！？](?=\p{L})/u.exec(sought) ?? /\s(?=\p{L})/u.exec(sought);
  return found ? from + found.index + found[0].length : 0;
}
