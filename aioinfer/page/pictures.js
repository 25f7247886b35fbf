// Pictures beside a message: chosen, pasted or dropped, scaled down, and sent as `image_url` parts.
// Only models that read them (`input_modalities` of `/v1/models`) are offered any.

import { $, element } from "./elements.js";
import { say, tool } from "./menu.js";

const MAX_SIDE = 1568; // px: models scale down what is larger
const MAX_BYTES = 1_000_000; // of a file that is sent as it is
const MAX_COUNT = 8; // beside one message
const KEPT = ["image/png", "image/jpeg", "image/webp"]; // that are sent as they are
const QUALITY = 0.9; // of JPEG

/** The text of a message's content, which may have pictures beside it. */
export function textOf(content) {
  if (!Array.isArray(content)) return content ?? "";
  return content.filter(({ type }) => type === "text").map(({ text }) => text).join("\n");
}

/** The data URLs of a message's pictures. */
export function picturesOf(content) {
  const urls = Array.isArray(content) ? content.map((part) => part.image_url?.url) : [];
  // nothing is loaded from elsewhere
  return urls.filter((url) => URL.canParse(url) && new URL(url).protocol === "data:");
}

/** A message with the address of each of its pictures replaced by what `change` returns. */
export function mapPictures(message, change) {
  if (!Array.isArray(message?.content)) return message;
  const content = message.content.map((part) => {
    const { image_url: picture } = part;
    const isPicture = typeof picture?.url === "string";
    return isPicture ? { ...part, image_url: { ...picture, url: change(picture.url) } } : part;
  });
  return { ...message, content };
}

/** Content of a message: the text, behind the pictures if there are any. */
export function contentOf(text, urls) {
  if (!urls.length) return text;
  const pictures = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...pictures, { type: "text", text }] : pictures;
}

/** Makes the row of a message's pictures; `remove(index)` is offered if it is given. */
export function rowOf(urls, remove = null) {
  const row = element("ul", "pictures");
  row.ariaLabel = "Pictures";
  for (const [index, url] of urls.entries()) {
    const shown = Object.assign(element("img"), { src: url, alt: `Picture ${index + 1}` });
    const item = element("li", "", "", shown);
    if (remove) item.append(tool("×", () => remove(index), `Remove picture ${index + 1}`));
    row.append(item);
  }
  return row;
}

/** The pictures of the message that is being written. */
export class Pictures {
  #urls = [];
  #row = null;
  coming = Promise.resolve(); // once all that were given are there, in their order
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    $("picture").addEventListener("click", () => $("picture-file").click());
    $("picture-file").addEventListener("change", ({ target }) => {
      this.#add([...target.files]);
      target.value = "";
    });
    $("prompt").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (files.length && !event.clipboardData.getData("text")) this.#take(event, files);
    });
    const chat = document.querySelector(".chat");
    const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes("Files");
    chat.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault(); // or the browser would leave the page for the file
      chat.classList.toggle("drop", this.#areRead);
    });
    chat.addEventListener("dragleave", ({ relatedTarget }) => {
      if (!chat.contains(relatedTarget)) chat.classList.remove("drop");
    });
    chat.addEventListener("drop", (event) => {
      chat.classList.remove("drop");
      if (hasFiles(event)) this.#take(event, [...event.dataTransfer.files]);
    });
    $("model").addEventListener("change", () => this.offer());
  }

  /** Offers pictures if the chosen model reads them. */
  offer() {
    $("picture").hidden = !this.#areRead;
  }

  get #areRead() {
    return $("model").selectedOptions[0]?.dataset.reads?.includes("image") ?? false;
  }

  get urls() {
    return this.#urls;
  }

  set urls(urls) {
    this.#urls = urls;
    const row = urls.length ? rowOf(urls, (index) => this.#remove(index)) : null;
    this.#row?.remove();
    this.#row = row;
    if (row) document.querySelector("label[for=prompt]").before(row);
    this.#onChange();
  }

  #remove(index) {
    this.urls = this.#urls.filter((_, at) => at !== index);
    $("prompt").focus();
  }

  #take(event, files) {
    event.preventDefault();
    if (this.#areRead) this.#add(files);
    else say("This model reads no pictures.");
  }

  #add(files) {
    for (const file of files) this.coming = this.coming.then(() => this.#addOne(file));
  }

  async #addOne(file) {
    if (this.#urls.length >= MAX_COUNT) return say(`A message has ${MAX_COUNT} pictures at most.`);
    try {
      this.urls = [...this.#urls, await urlOf(file)];
    } catch {
      say(`“${file.name}” is no picture that this browser can read.`);
    }
  }
}

/** Returns the data URL of a picture, scaled down if it is large. Throws where it is none. */
async function urlOf(file) {
  const picture = await createImageBitmap(file); // turned as its EXIF data says
  const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= MAX_BYTES && KEPT.includes(file.type)) return readUrl(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
