// Elements that the page makes in many places.

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
