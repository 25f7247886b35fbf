// Elements that the page makes in many places.

const COPIED_MS = 1500; // how long a button shows that it has copied

/** Makes an element with a class and a text. */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
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
  const block = element("div", "code");
  const bar = element("div", "code-bar");
  const copies = button("copy", "Copy");
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // to be scrolled by keyboard
  pre.append(element("code", "", text));
  copies.addEventListener("click", () => copy(copies, pre.firstChild));
  bar.append(element("span", "language", language), copies);
  block.append(bar, pre);
  return block;
}

async function copy(pressed, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    pressed.textContent = "Copied";
  } catch {
    // without HTTPS browsers have no clipboard for pages: one key is left to press
    getSelection().selectAllChildren(code);
    pressed.textContent = "Selected";
  }
  setTimeout(() => (pressed.textContent = "Copy"), COPIED_MS);
}
