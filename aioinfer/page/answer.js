// One answer as it streams in: thoughts, text, tool calls, figures, and what went wrong.

import { ApiError, readEvents, request } from "./api.js";
import { Calls } from "./calls.js";
import { JsonView, parsed } from "./json.js";
import { element } from "./markdown.js";
import { Thought, followEnd } from "./views.js";

/** One answer, and the part of the log that shows it. */
export class Answer {
  calls = null; // a `Calls`, once the model calls a tool
  #controller = new AbortController();
  #sent = performance.now();
  #first = 0;
  #last = 0;
  #events = 0;
  #reason = "";
  #usage = null;
  #thought = null;
  #shown = element("div", "said answer");
  #view;

  /** `prompt` is shown above the answer, if there is any; `View` shows the answer's text. */
  constructor(prompt, View) {
    this.prompt = prompt;
    this.turn = element("article", prompt ? "turn busy" : "turn busy goes-on");
    this.#view = new View(this.#shown, followEnd);
    if (prompt) this.turn.append(element("div", "said user", prompt));
    this.turn.append(this.#shown);
  }

  /**
   * The answer as a message of the conversation; null if nothing came. Thoughts are never content:
   * whether the next turn shows them to the model is up to the chat template.
   */
  get message() {
    const calls = this.calls?.asked ?? [];
    const content = this.#view.text;
    if (!content && !calls.length) return null;
    const message = { role: "assistant", content };
    if (this.#thought) message.reasoning_content = this.#thought.text;
    if (calls.length) message.tool_calls = calls;
    return message;
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
    if (event.error) throw new ApiError(0, event.error.message, event.error.param);
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
    this.#show(choice.delta ?? { content: choice.text });
  }

  #show({ content, reasoning_content: thought, tool_calls: calls }) {
    if (thought) this.#think(thought);
    if (content || calls?.length) this.#thought?.pause();
    if (content) this.#view.append(content);
    if (!calls?.length) return;
    if (!this.calls) {
      this.calls = new Calls(followEnd);
      this.turn.append(this.calls.node);
    }
    this.calls.take(calls);
  }

  #think(text) {
    if (!this.#thought) {
      this.#thought = new Thought();
      this.#shown.before(this.#thought.node);
    }
    this.#thought.append(text);
  }

  /** Shows what went wrong, below what has come. */
  fail(error) {
    this.#reason = "error";
    this.turn.classList.toggle("failed", !this.message);
    const { status, message } = error;
    const failure = element("p", "failure", status ? `${status}: ${message}` : message);
    failure.setAttribute("role", "alert");
    this.turn.append(failure);
  }

  /** Shows the figures of the whole. */
  finish() {
    this.turn.classList.remove("busy");
    this.#thought?.pause();
    this.#view.finish();
    this.#showJson();
    this.calls?.finish();
    if (this.#first) this.turn.append(element("p", "figures", this.#figures()));
    document.getElementById("log").scrollTop = document.getElementById("log").scrollHeight;
  }

  /** Shows a text that has turned out to be JSON as such. */
  #showJson() {
    const { text } = this.#view;
    const isPlain = this.#shown.classList.contains("plain"); // no chat: as the model wrote it
    if (isPlain || this.#view instanceof JsonView || !/^\s*[[{]/.test(text)) return;
    if (parsed(text) === undefined) return;
    this.#shown.replaceChildren();
    this.#view = new JsonView(this.#shown);
    this.#view.append(text);
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
    return parts.filter(Boolean).join(" · ");
  }
}
