// Small controls: toolbars of buttons, menus that open beside one, blocks of code, and a line that says
// what was done.

import { $, element } from "./elements.js";

const SAID_MS = 8000; // how long something is said, and a removal can be undone

/** Makes a button of a toolbar; `label` is read aloud where `text` says too little. */
export function tool(text, action, label = text) {
  const made = Object.assign(element("button", "tool", text), { type: "button" });
  if (label !== text) made.ariaLabel = made.title = label;
  made.addEventListener("click", action);
  return made;
}

/** Makes a menu: a button, and the actions that it opens, `[[text, action], ...]`. */
export function menu(label, actions) {
  const list = element("div", "menu-list");
  const opens = tool("⋯", () => {}, label);
  opens.popoverTargetElement = list;
  list.popover = "auto";
  list.append(...actions.map(([name, action]) => tool(name, action)));
  // before the action, for it gives the focus back to the button
  list.addEventListener("click", () => list.hidePopover(), { capture: true });
  return element("span", "menu", "", opens, list);
}

/** Makes a block of code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const pre = element("pre", "", "", element("code", "", text));
  const copies = tool("Copy", () => copy(pre.textContent, pre.firstChild));
  const bar = element("div", "code-bar", "", element("span", "language", language), copies);
  const block = element("div", "code", "", bar, pre);
  pre.tabIndex = 0; // to be scrolled by keyboard
  block.dir = "ltr"; // whatever the text around it is
  return block;
}

let timer = 0;

/** Says something for a while, in a line over the page. */
export function say(text, ...buttons) {
  const line = $("said");
  clearTimeout(timer);
  line.replaceChildren(element("span", "", text), ...buttons);
  line.hidden = false;
  timer = setTimeout(unsay, SAID_MS);
}

function unsay() {
  if ($("said").contains(document.activeElement)) $("log").focus();
  $("said").hidden = true;
  $("said").replaceChildren();
}

/** Says what was removed, and offers to bring it back for a while. */
export function offerUndo(text, undo) {
  const back = tool("Undo", undo);
  back.addEventListener("click", unsay);
  say(text, back);
  back.focus(); // what was pressed is gone, and the time is short
}

/**
 * Copies a text. Without HTTPS a browser has no clipboard for pages: then `source`, the element that
 * shows the text, is selected, and one key is left to press.
 */
export async function copy(text, source = null) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    if (source) getSelection().selectAllChildren(source);
    say(`${source ? "Selected: t" : "T"}his browser has no clipboard here.`);
  }
}

/** Has the browser save a text as a file. */
export function saveFile(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  Object.assign(element("a"), { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
