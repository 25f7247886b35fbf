// The chat: a conversation, the settings of its requests, and each answer as it streams in. Answers
// are shown as Markdown; what the user writes, and what a model without a chat template writes, as
// it is.

import { ApiError, readEvents, request } from "./api.js";
import { MarkdownView, element } from "./markdown.js";

const SCROLL_SLACK = 40; // px from the end of the log within which it follows new text
const NO_TEMPLATE = "This model has no chat template: it continues whatever text you give it.";
const NO_TOKENIZER =
  "This server runs without a tokenizer (model.skip_tokenizer): " +
  "/v1/completions takes and returns token ids, and there is no chat.";

const $ = (id) => document.getElementById(id);

/** Shows a text that grows as it is; a `MarkdownView` for texts without Markdown. */
class PlainView {
  text = "";
  #node = document.createTextNode("");
  #around;

  constructor(container, around) {
    container.classList.add("plain");
    container.append(this.#node);
    this.#around = around;
  }

  append(text) {
    this.text += text;
    this.#around(() => this.#node.appendData(text));
  }

  finish() {}
}

/** Changes what the log shows; if its end could be seen before, it can be seen afterwards. */
function followEnd(change) {
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < SCROLL_SLACK;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

export class Chat {
  #info = { chat: true, defaults: {} };
  #messages = []; // the turns that have an answer, as the API has them
  #answer = null; // { abort, ... } while one is coming

  constructor() {
    const composer = $("composer");
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    composer.addEventListener("input", () => this.#countSettings());
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        composer.requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    $("halt").addEventListener("click", () => this.#stop());
    $("clear").addEventListener("click", () => this.#clear());
    $("reset").addEventListener("click", () => {
      for (const field of this.#fields()) field.value = "";
      this.#countSettings();
    });
  }

  /** Lets the user write, once it is known what the server serves (`/page/info`). */
  open(info) {
    this.#info = info;
    for (const [name, value] of Object.entries(info.defaults)) {
      $("composer").elements[name].placeholder = value;
    }
    for (const field of document.querySelectorAll(".chat-only")) field.hidden = !info.chat;
    const without = info.chat ? "what fits" : "16"; // as OpenAI's API has it
    $("composer").elements.max_tokens.placeholder = info.defaults.max_tokens ?? without;
    $("prompt").placeholder = info.chat ? "Message" : "Text to continue";
    $("hint").textContent = info.chat
      ? "Ask something."
      : info.tokenizer === false
        ? NO_TOKENIZER
        : NO_TEMPLATE;
    if (info.tokenizer === false) return;
    $("prompt").disabled = $("send").disabled = false;
    // a phone would open its keyboard
    if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus();
  }

  // ---------------------------------------------------------------- settings

  #fields() {
    return [...document.querySelectorAll(".fields :is(input, textarea)")];
  }

  #countSettings() {
    const set = this.#fields().filter((field) => field.value).length;
    $("num-set").textContent = set ? `${set} set` : "";
  }

  /**
   * Returns the settings that were made, as fields of a request; what is left empty is up to the
   * model.
   */
  #settings() {
    const body = {};
    for (const field of this.#fields()) {
      if (field.type === "number" && field.value) body[field.name] = Number(field.value);
    }
    const stops = $("composer").elements.stop.value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops.map((stop) => stop.replaceAll("\\n", "\n"));
    return body;
  }

  #request(prompt) {
    const body = {
      model: $("model").value,
      stream: true,
      stream_options: { include_usage: true },
      ...this.#settings(),
    };
    if (!this.#info.chat) return ["/v1/completions", { ...body, prompt }];
    const system = $("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return [
      "/v1/chat/completions",
      { ...body, messages: [...first, ...this.#messages, { role: "user", content: prompt }] },
    ];
  }

  // ---------------------------------------------------------------- turns

  async #send() {
    const prompt = $("prompt").value;
    if (this.#answer || !prompt.trim() || $("prompt").disabled) return;
    const wrong = this.#fields().find((field) => field.validity.badInput);
    if (wrong) {
      document.querySelector(".settings").open = true;
      wrong.reportValidity();
      return;
    }
    const answer = new Answer(prompt, this.#info.chat ? MarkdownView : PlainView);
    this.#begin(answer);
    try {
      await answer.receive(...this.#request(prompt));
    } catch (error) {
      if (error.name !== "AbortError") answer.fail(error);
    }
    if (this.#answer === answer) this.#end(answer); // else the log was cleared meanwhile
  }

  #begin(answer) {
    this.#answer = answer;
    $("hint").hidden = true;
    $("log").append(answer.turn);
    // or a screen reader would read every token by itself
    $("log").setAttribute("aria-busy", "true");
    $("log").scrollTop = $("log").scrollHeight;
    $("prompt").value = "";
    $("send").hidden = true;
    $("halt").hidden = false;
  }

  #end(answer) {
    this.#answer = null;
    answer.finish();
    $("log").setAttribute("aria-busy", "false");
    $("send").hidden = false;
    const stopHadFocus = document.activeElement === $("halt");
    $("halt").hidden = true;
    if (stopHadFocus) $("prompt").focus();
    if (answer.text) {
      this.#messages.push(
        { role: "user", content: answer.prompt },
        { role: "assistant", content: answer.text },
      );
    } else if (!$("prompt").value) {
      // nothing came of it: it is not part of the conversation, and can be sent again
      $("prompt").value = answer.prompt;
    }
  }

  #stop() {
    this.#answer?.abort();
  }

  #clear() {
    const answer = this.#answer;
    if (answer) {
      answer.abort();
      answer.prompt = "";
      this.#end(answer);
    }
    this.#messages = [];
    for (const turn of document.querySelectorAll(".turn")) turn.remove();
    $("hint").hidden = false;
    $("prompt").focus();
  }
}

/** One answer as it comes: its text, its figures, and the part of the log that shows both. */
class Answer {
  #controller = new AbortController();
  #sent = performance.now();
  #first = 0;
  #last = 0;
  #events = 0;
  #reason = "";
  #usage = null;
  #view;

  constructor(prompt, View) {
    this.prompt = prompt;
    this.turn = element("article", "turn busy");
    const shown = element("div", "said answer");
    this.#view = new View(shown, followEnd);
    this.turn.append(element("div", "said user", prompt), shown);
  }

  /** What has come, as the model wrote it. */
  get text() {
    return this.#view.text;
  }

  /** Ends the request; what has come stays. */
  abort() {
    this.#reason ||= "stopped";
    this.#controller.abort();
  }

  /** Posts the request and takes its events. Throws `ApiError` or `AbortError`. */
  async receive(path, body) {
    const response = await request(path, { body, signal: this.#controller.signal });
    try {
      for await (const data of readEvents(response.body)) {
        if (data === "[DONE]") return;
        this.#take(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError(0, `The answer broke off: ${error.message}`);
    }
    throw new ApiError(0, "The connection ended before the answer did.");
  }

  #take(event) {
    if (event.error) throw new ApiError(0, event.error.message);
    this.#usage = event.usage ?? this.#usage;
    const [choice] = event.choices;
    if (!choice) return;
    this.#reason = choice.finish_reason ?? this.#reason;
    if (choice.delta?.role) return; // opens the message, before any token
    if (choice.finish_reason === null) {
      this.#last = performance.now();
      this.#first ||= this.#last;
      this.#events++;
    }
    const text = choice.delta?.content ?? choice.text;
    if (text) this.#view.append(text);
  }

  /** Shows what went wrong, below what has come. */
  fail(error) {
    this.#reason = "error";
    this.turn.classList.toggle("failed", !this.text);
    const failure = element(
      "p",
      "failure",
      error.status ? `${error.status}: ${error.message}` : error.message,
    );
    failure.setAttribute("role", "alert");
    this.turn.append(failure);
  }

  /** Shows the figures of the whole. */
  finish() {
    this.turn.classList.remove("busy");
    this.#view.finish();
    if (this.#first) this.turn.append(element("p", "figures", this.#figures()));
    $("log").scrollTop = $("log").scrollHeight;
  }

  #figures() {
    const tokens = this.#usage?.completion_tokens ?? this.#events;
    const parts = [`${this.#usage ? "" : "about "}${tokens} ${tokens === 1 ? "token" : "tokens"}`];
    if (this.#usage) {
      const cached = this.#usage.prompt_tokens_details.cached_tokens;
      parts[0] += ` (prompt ${this.#usage.prompt_tokens}${cached ? `, ${cached} cached` : ""})`;
    }
    parts.push(`first after ${((this.#first - this.#sent) / 1e3).toFixed(2)} s`);
    const decoding = (this.#last - this.#first) / 1e3;
    if (tokens > 1 && decoding > 0) parts.push(`${((tokens - 1) / decoding).toFixed(1)} tokens/s`);
    parts.push(this.#reason);
    return parts.join(" · ");
  }
}
