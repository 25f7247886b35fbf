// Where the user writes: the message, its settings, and how many tokens it takes.

import { request } from "./api.js";
import { $, whole } from "./elements.js";
import { contentOf, Pictures, picturesOf, textOf } from "./pictures.js";
import { Settings } from "./settings.js";

const NO_TEMPLATE = "This model has no chat template: it continues whatever text you give it.";
const NO_TOKENIZER =
  "This server runs without a tokenizer (model.tokenizer): " +
  "/v1/completions takes and returns token ids, and there is no chat.";
const DRAFT = "aioinfer-draft";
const COUNT_MS = 400; // how long nothing is typed before the tokens are counted

const hasKeyboard = () => !matchMedia("(pointer: coarse)").matches; // a phone would open its own

export class Composer {
  settings = new Settings();
  #pictures = new Pictures(() => this.#count());
  #info = {};
  #messages;
  #timer = 0;
  #counted = new Map(); // promises of the tokens of each picture, by its URL

  /** `send(content)` returns whether the message was sent; `messages()` are those before it. */
  constructor({ send, stop, messages }) {
    this.#messages = messages;
    $("composer").addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#pictures.coming; // one that was just pasted belongs to the message
      const { content } = this;
      if (textOf(content).trim() || picturesOf(content).length) send(content);
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("composer").requestSubmit();
      }
    });
    $("composer").addEventListener("input", () => this.#onInput());
    document.addEventListener("keydown", (event) => {
      // where a menu is open, the key closes that alone
      if (event.key === "Escape" && !document.querySelector(":popover-open")) stop();
    });
    $("halt").addEventListener("click", stop);
    $("model").addEventListener("change", () => {
      this.#counted.clear();
      this.#count();
    });
  }

  /** Lets the user write, once it is known what the server serves. */
  open(info) {
    this.#info = info;
    this.settings.open(info);
    $("prompt").placeholder = info.chat ? "Message" : "Text to continue";
    const lacks = info.tokenizer === false ? NO_TOKENIZER : NO_TEMPLATE;
    $("hint").textContent = info.chat ? "Ask something." : lacks;
    if (info.tokenizer === false) return;
    $("prompt").disabled = $("send").disabled = false;
    $("prompt").value ||= (sessionStorage.getItem(DRAFT) ?? "");
    this.#pictures.offer();
    this.#count();
    if (document.activeElement !== $("model")) this.focus();
  }

  /** What is written: a text, or pictures and a text. */
  get content() {
    return contentOf($("prompt").value, this.#info.chat ? this.#pictures.urls : []);
  }

  focus() {
    if (hasKeyboard() && !$("prompt").disabled) $("prompt").focus();
  }

  putBack(content) {
    $("prompt").value ||= textOf(content);
    if (!this.#pictures.urls.length) this.#pictures.urls = picturesOf(content);
  }

  showBusy(content) {
    // a small screen is left to the answer
    const folds = hasKeyboard() ? [] : document.querySelectorAll(".folds [open]");
    for (const fold of folds) fold.open = false;
    if (document.activeElement === document.body || $("log").contains(document.activeElement)) {
      if (hasKeyboard()) $("prompt").focus();
      else document.activeElement.blur(); // a result is written no more
    }
    if (content) {
      $("prompt").value = "";
      this.#pictures.urls = [];
    }
    sessionStorage.removeItem(DRAFT);
    $("tokens").textContent = "";
    $("send").hidden = true;
    $("halt").hidden = false;
  }

  /** `calls`: those whose results the model waits for. */
  showIdle(calls) {
    const stopHadFocus = document.activeElement === $("halt");
    $("send").hidden = false;
    $("halt").hidden = true;
    const isWriting = document.activeElement === $("prompt") && $("prompt").value;
    if (calls && hasKeyboard() && !isWriting) calls.focus();
    else if (stopHadFocus) $("prompt").focus();
    this.#count();
  }

  #onInput() {
    sessionStorage.setItem(DRAFT, $("prompt").value); // a reload loses nothing
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#count(), COUNT_MS);
  }

  /** Says how many tokens the conversation has, with the message that is being written. */
  async #count() {
    const written = this.content;
    // what cannot be counted is refused when it is sent
    const isCounted = this.#info.tokenizer !== false;
    const count = isCounted ? await this.#tokensWith(written).catch(() => 0) : 0;
    if ($("prompt").value !== textOf(written) || !$("halt").hidden) return;
    const limit = this.#info.max_model_len;
    $("tokens").textContent = count ? `${whole.format(count)} of ${whole.format(limit)} tokens` : "";
    $("tokens").classList.toggle("over", count >= limit);
  }

  async #tokensWith(content) {
    if (!this.#info.chat) return content && tokensOf({ prompt: content });
    const messages = this.#messages();
    const system = $("system").value.trim();
    if (content.length) messages.push({ role: "user", content });
    if (!messages.length) return 0;
    if (system) messages.unshift({ role: "system", content: system });
    const texts = messages.map((each) => ({ ...each, content: textOf(each.content) }));
    const urls = messages.flatMap((each) => picturesOf(each.content));
    const counts = await Promise.all([
      tokensOf({ messages: texts }),
      ...urls.map((url) => this.#tokensOfPicture(url)),
    ]);
    return counts.reduce((sum, each) => sum + each, 0);
  }

  /** A picture is sent once to be counted, and not with each pause of typing. */
  #tokensOfPicture(url) {
    if (!this.#counted.has(url)) {
      const countOf = (content) => tokensOf({ messages: [{ role: "user", content }] });
      const both = Promise.all([countOf(contentOf("x", [url])), countOf("x")]);
      this.#counted.set(url, both.then(([shown, bare]) => shown - bare));
    }
    return this.#counted.get(url);
  }
}

/** The number of tokens of a prompt or of messages. */
async function tokensOf(body) {
  const response = await request("/tokenize", { body: { model: $("model").value, ...body } });
  return (await response.json()).count;
}
