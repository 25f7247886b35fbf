// The chat: a conversation, and each answer as it streams in. Answers are shown as Markdown, or as
// JSON where a schema was set; what the user writes, and what a model without a chat template
// writes, as it is.

import { Answer } from "./answer.js";
import { JsonView } from "./json.js";
import { MarkdownView } from "./markdown.js";
import { Settings } from "./settings.js";
import { PlainView } from "./views.js";

const NO_TEMPLATE = "This model has no chat template: it continues whatever text you give it.";
const NO_TOKENIZER =
  "This server runs without a tokenizer (model.skip_tokenizer): " +
  "/v1/completions takes and returns token ids, and there is no chat.";

const $ = (id) => document.getElementById(id);
const hasKeyboard = () => !matchMedia("(pointer: coarse)").matches; // a phone would open its own

export class Chat {
  #info = { chat: true };
  #settings = new Settings();
  #messages = []; // those that have been answered and the answers, as the API has them
  #calls = null; // those of the last answer, while their results are being written
  #answer = null; // the `Answer` that is coming

  constructor() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendPrompt();
    });
    $("log").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendResults();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("composer").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    $("halt").addEventListener("click", () => this.#stop());
    $("clear").addEventListener("click", () => this.#clear());
  }

  /** Lets the user write, once it is known what the server serves (`/page/info`). */
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
    if (hasKeyboard()) $("prompt").focus();
  }

  // ---------------------------------------------------------------- turns

  #sendPrompt() {
    const prompt = $("prompt").value;
    if (!prompt.trim() || $("prompt").disabled) return;
    const results = this.#calls?.results(true) ?? [];
    this.#ask([...results, { role: "user", content: prompt }], prompt);
  }

  #sendResults() {
    if (this.#calls) this.#ask(this.#calls.results());
  }

  /** Sends messages, which become part of the conversation together with their answer. */
  async #ask(messages, prompt = "") {
    if (this.#answer) return;
    const settings = this.#settings.read();
    if (!settings) return;
    const chatView = settings.response_format ? JsonView : MarkdownView;
    const answer = new Answer(prompt, this.#info.chat ? chatView : PlainView);
    this.#begin(answer);
    try {
      await answer.receive(...this.#request(settings, messages));
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.fail(error);
        this.#settings.blame(error.param, error.message);
      }
    }
    if (this.#answer === answer) this.#end(answer, messages); // else the log was cleared meanwhile
  }

  #request(settings, messages) {
    const body = {
      model: $("model").value,
      stream: true,
      stream_options: { include_usage: true },
      ...settings,
    };
    if (!this.#info.chat) return ["/v1/completions", { ...body, prompt: messages[0].content }];
    const system = $("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return [
      "/v1/chat/completions",
      { ...body, messages: [...first, ...this.#messages, ...messages] },
    ];
  }

  #begin(answer) {
    this.#answer = answer;
    if ($("log").contains(document.activeElement)) {
      if (hasKeyboard()) $("prompt").focus();
      else document.activeElement.blur(); // a result is written no more
    }
    this.#calls?.close(true);
    $("hint").hidden = true;
    $("log").append(answer.turn);
    // or a screen reader would read every token by itself
    $("log").setAttribute("aria-busy", "true");
    $("log").scrollTop = $("log").scrollHeight;
    if (answer.prompt) $("prompt").value = "";
    $("send").hidden = true;
    $("halt").hidden = false;
  }

  #end(answer, messages) {
    const stopHadFocus = document.activeElement === $("halt");
    this.#showIdle(answer);
    const { message } = answer;
    if (message) {
      this.#messages.push(...messages, message);
      this.#calls = message.tool_calls ? answer.calls : null;
    } else {
      // nothing came of it: it is not part of the conversation, and can be sent again
      this.#calls?.close(false);
      $("prompt").value ||= answer.prompt;
    }
    const isWriting = document.activeElement === $("prompt") && $("prompt").value;
    if (message?.tool_calls && hasKeyboard() && !isWriting) this.#calls.focus();
    else if (stopHadFocus) $("prompt").focus();
  }

  #showIdle(answer) {
    this.#answer = null;
    answer.finish();
    $("log").setAttribute("aria-busy", "false");
    $("send").hidden = false;
    $("halt").hidden = true;
  }

  #stop() {
    this.#answer?.abort();
  }

  #clear() {
    const answer = this.#answer;
    if (answer) {
      answer.abort();
      this.#showIdle(answer);
    }
    this.#messages = [];
    this.#calls = null;
    for (const turn of document.querySelectorAll(".turn")) turn.remove();
    $("hint").hidden = false;
    $("prompt").focus();
  }
}
