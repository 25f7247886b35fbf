// Where the user writes: the message, its settings, and how many tokens it takes.

import { request } from "./api.js";
import { contentOf, Pictures, picturesOf, textOf } from "./pictures.js";
import { Settings } from "./settings.js";

const NO_TEMPLATE = "This model has no chat template: it continues whatever text you give it.";
const NO_TOKENIZER =
  "This server runs without a tokenizer (model.skip_tokenizer): " +
  "/v1/completions takes and returns token ids, and there is no chat.";
const DRAFT = "aioinfer-draft";
const COUNT_MS = 400; // how long nothing is typed before the tokens are counted

const $ = (id) => document.getElementById(id);
const hasKeyboard = () => !matchMedia("(pointer: coarse)").matches; // a phone would open its own
const whole = new Intl.NumberFormat("en");

export class Composer {
  #settings = new Settings();
  #pictures = new Pictures(() => this.#count());
  #info = {};
  #messages;
  #timer = 0;

  /** `send(content)` returns whether the message was sent; `messages()` are those before it. */
  constructor({ send, stop, messages }) {
    this.#messages = messages;
    $("composer").addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#pictures.settled; // one that was just pasted belongs to the message
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
      if (event.key === "Escape") stop();
    });
    $("halt").addEventListener("click", stop);
  }

  /** Lets the user write, once it is known what the server serves. */
  open(info) {
    this.#info = info;
    this.#settings.open(info);
    $("prompt").placeholder = info.chat ? "Message" : "Text to continue";
    $("hint").textContent = info.chat
      ? "Ask something."
      : info.tokenizer === false
        ? NO_TOKENIZER
        : NO_TEMPLATE;
    if (info.tokenizer === false) return;
    $("prompt").disabled = $("send").disabled = false;
    $("prompt").value ||= (sessionStorage.getItem(DRAFT) ?? "");
    this.#pictures.offer();
    this.#count();
    this.focus();
  }

  /** What is written: a text, or pictures and a text. */
  get content() {
    return contentOf($("prompt").value, this.#info.chat ? this.#pictures.urls : []);
  }

  /** The settings of a request, of two where answers are compared; null if something is wrong. */
  read() {
    return this.#settings.read();
  }

  /** Says at a field of the settings what is wrong with it. */
  blame(param, message) {
    this.#settings.blame(param, message);
  }

  focus() {
    if (hasKeyboard() && !$("prompt").disabled) $("prompt").focus();
  }

  putBack(content) {
    $("prompt").value ||= textOf(content);
    if (!this.#pictures.urls.length) this.#pictures.urls = picturesOf(content);
  }

  showBusy(content) {
    if ($("log").contains(document.activeElement)) {
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

  /** Says how many tokens the conversation has with the message that is being written. */
  async #count() {
    const text = $("prompt").value;
    const { content } = this;
    const isEmpty = !text.trim() && !picturesOf(content).length;
    if (isEmpty || this.#info.tokenizer === false) {
      $("tokens").textContent = "";
      return;
    }
    const messages = [...this.#messages(), { role: "user", content }];
    const model = $("model").value;
    try {
      const body = this.#info.chat ? { model, messages } : { model, prompt: text };
      const { count } = await (await request("/tokenize", { body })).json();
      if ($("prompt").value !== text) return;
      const limit = this.#info.max_model_len;
      $("tokens").textContent = `${whole.format(count)} of ${whole.format(limit)} tokens`;
      $("tokens").classList.toggle("over", count >= limit);
    } catch {
      $("tokens").textContent = ""; // what cannot be counted is refused when it is sent
    }
  }
}
