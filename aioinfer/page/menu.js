// Small controls: toolbars of buttons, menus that open beside one, and a line that says what was done.

import { $, button, copyText, element } from "./elements.js";

const SAID_MS = 8000; // how long something is said, and a removal can be undone

/** Makes a button of a toolbar; `label` is read aloud where `text` says too little. */
export function tool(text, action, label = text) {
  const made = button("tool", text);
  if (label !== text) made.ariaLabel = made.title = label;
  made.addEventListener("click", (event) => action(event));
  return made;
}

/** Makes a menu: a button, and the actions that it opens, `[[text, action], ...]`. */
export function menu(label, actions) {
  const list = element("div", "menu-list");
  const opens = tool("⋯", () => {}, label);
  opens.popoverTargetElement = list;
  list.popover = "auto";
  for (const [name, action] of actions) {
    list.append(
      tool(name, () => {
        list.hidePopover(); // which gives the focus back to the button
        action();
      }),
    );
  }
  return element("span", "menu", "", opens, list);
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
  clearTimeout(timer);
  const line = $("said");
  line.hidden = true;
  line.replaceChildren();
}

/** Says what was removed, and offers to bring it back for a while. */
export function offerUndo(text, undo) {
  const back = tool("Undo", () => {
    unsay();
    undo();
  });
  say(text, back);
}

/** Copies a text, and says whether the browser could; `source` is as in `copyText`. */
export async function copyAndSay(text, source = null) {
  if (await copyText(text, null, source)) say("Copied.");
  else say(source ? "Selected: this browser has no clipboard here." : "This browser has no clipboard here.");
}

/** Has the browser save a text as a file. */
export function saveFile(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  Object.assign(element("a"), { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
