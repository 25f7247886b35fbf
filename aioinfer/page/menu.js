// Small controls: toolbars of buttons, menus that open beside one, and a line that offers to undo.

import { button, element } from "./elements.js";

const UNDO_MS = 8000; // how long a removal can be undone

/** Makes a button of a toolbar; `label` is read aloud where `text` says too little. */
export function tool(text, action, label = text) {
  const made = button("tool", text);
  if (label !== text) made.ariaLabel = made.title = label;
  made.addEventListener("click", (event) => action(event));
  return made;
}

/** Makes a menu: a button, and the actions that it opens, `[[text, action], ...]`. */
export function menu(label, actions, text = "⋯") {
  const made = element("details", "menu");
  const summary = element("summary", "tool", text);
  summary.ariaLabel = summary.title = label;
  const list = element("div", "menu-list");
  for (const [name, action] of actions) {
    list.append(
      tool(name, () => {
        made.open = false;
        summary.focus();
        action();
      }),
    );
  }
  made.append(summary, list);
  made.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !made.contains(relatedTarget)) made.open = false;
  });
  made.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !made.open) return;
    event.stopPropagation(); // an answer that is coming goes on
    made.open = false;
    summary.focus();
  });
  return made;
}

addEventListener("click", ({ target }) => {
  for (const open of document.querySelectorAll("details.menu[open]"))
    if (!open.contains(target)) open.open = false;
});

let timer = 0;

/** Says what was removed, and offers to bring it back for a while. */
export function offerUndo(text, undo) {
  const line = document.getElementById("undo");
  clearTimeout(timer);
  const close = () => {
    line.hidden = true;
    line.replaceChildren();
  };
  const back = tool("Undo", () => {
    close();
    undo();
  });
  line.replaceChildren(element("span", "", text), back);
  line.hidden = false;
  timer = setTimeout(close, UNDO_MS);
}

/** Copies a text and says so on the button that was pressed. Returns whether the browser could. */
export async function copyText(text, pressed) {
  const before = pressed?.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = false; // without HTTPS browsers have no clipboard for pages
  }
  if (pressed) {
    pressed.textContent = done ? "Copied" : "No clipboard";
    setTimeout(() => (pressed.textContent = before), 1500);
  }
  return done;
}

/** Has the browser save a text as a file. */
export function saveFile(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
