// Colours for code, by highlight.js, which is loaded with the first block of a language that it
// knows. It finds the scopes of a text; the page makes the elements itself, for a string never becomes
// HTML here.

import { element } from "./elements.js";

const MAX_LENGTH = 50_000; // of a block that is coloured: a longer one takes many milliseconds

const done = new WeakSet(); // blocks that are coloured, or about to be

let loading = null;

/** Colours a block of code, `{ code, language }`, whose text no longer changes. */
export async function highlight(code, language) {
  if (!language || done.has(code) || code.textContent.length > MAX_LENGTH) return;
  done.add(code);
  loading ??= import("./vendor/highlight.min.mjs").catch(() => null);
  const library = (await loading)?.default;
  await new Promise((wake) => (window.requestIdleCallback ?? setTimeout)(wake)); // not all in a frame
  if (!library?.getLanguage(language)) return;
  const text = code.textContent;
  // the tree of scopes is what the library makes its HTML of (its plugin interface's `emitter`)
  const found = library.highlight(text, { language, ignoreIllegals: true })._emitter?.rootNode;
  const made = document.createDocumentFragment();
  appendScopes(made, found?.children ?? []);
  if (made.textContent === text && code.textContent === text) code.replaceChildren(made);
}

function appendScopes(parent, children) {
  for (const child of children) {
    if (typeof child === "string") {
      parent.append(child);
      continue;
    }
    const made = element("span", `hl-${(child.scope ?? "none").split(".")[0].replaceAll("_", "-")}`);
    appendScopes(made, child.children);
    parent.append(made);
  }
}
