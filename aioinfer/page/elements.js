// Elements that the page makes in many places.

const COPIED_MS = 1500; // how long a button shows that it has copied

/** The element of the page with this id. */
export const $ = (id) => document.getElementById(id);

/** Formats whole numbers. */
export const whole = new Intl.NumberFormat("en");

/** Makes an element with a class, a text and what else is within it. */
export function element(tag, className = "", text = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  made.append(...children);
  return made;
}

/** Makes a button that submits nothing. */
export function button(className, text) {
  const made = element("button", className, text);
  made.type = "button";
  return made;
}

/** Makes a block of code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const pre = element("pre", "", "", element("code", "", text));
  const copies = button("copy", "Copy");
  copies.addEventListener("click", () => copyText(pre.textContent, copies, pre.firstChild));
  const bar = element("div", "code-bar", "", element("span", "language", language), copies);
  const block = element("div", "code", "", bar, pre);
  pre.tabIndex = 0; // to be scrolled by keyboard
  block.dir = "ltr"; // whatever the text around it is
  return block;
}

/**
 * Copies a text, and says so on the button that was pressed, if there is one. Returns whether the
 * browser could: without HTTPS it has no clipboard for pages. Then `source`, the element that shows
 * the text, is selected: one key is left to press.
 */
export async function copyText(text, pressed = null, source = null) {
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = source ? "Selected" : "No clipboard";
    if (source) getSelection().selectAllChildren(source);
  }
  if (pressed && pressed.textContent !== said) {
    const before = pressed.textContent;
    pressed.textContent = said;
    setTimeout(() => (pressed.textContent = before), COPIED_MS);
  }
  return said === "Copied";
}
