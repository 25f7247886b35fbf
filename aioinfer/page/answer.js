// One answer, as it streams in or as it was kept: thoughts, text, tool calls, figures, and what went
// wrong.

import { ApiError, readEvents, request, said } from "./api.js";
import { Calls } from "./calls.js";
import { element } from "./elements.js";
import { Figures } from "./figures.js";
import { JsonView, parsed } from "./json.js";
import { Tokens } from "./tokens.js";
import { MarkdownView } from "./markdown.js";
import { Thought, followEnd, followSoon } from "./views.js";

/** One answer, and the part of its turn that shows it. */
export class Answer {
  node = element("div", "reply");
  calls = null; // a `Calls`, once the model calls a tool
  tokens = new Tokens(); // with their log-probabilities, where these were asked for
  #controller = new AbortController();
  #figures;
  #thought = null;
  #shown = element("div", "said answer");
  #view;
  #failure = null;

  /**
   * `View` shows the text. `kept` is a node of the conversation (`{ message, facts }`) whose answer
   * is shown, and may be continued.
   */
  constructor(View, kept = null) {
    // Markdown is rendered once a frame, everything else as it comes
    this.#view = new View(this.#shown, View === MarkdownView ? followEnd : followSoon);
    this.node.append(this.#shown);
    this.#figures = new Figures(kept?.facts);
    if (!kept) return;
    const { content, reasoning_content: thought, tool_calls: calls } = kept.message;
    if (thought) this.#think(thought, kept.facts.thoughtMs);
    if (content) this.#view.append(content);
    if (calls) this.#show({ tool_calls: calls.map((call, index) => ({ index, ...call })) });
    this.tokens = new Tokens(kept.facts.tokens);
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

  /**
   * What the conversation keeps beside the message: its tokens only once it is complete, for to keep
   * a hundred thousand alternatives takes longer than a frame.
   */
  get facts() {
    const facts = { ...this.#figures.facts };
    if (this.#thought) facts.thoughtMs = this.#thought.ms;
    const isComing = this.node.classList.contains("busy");
    if (!isComing && this.tokens.length) facts.tokens = this.tokens.kept;
    if (this.#failure) facts.failure = this.#failure;
    return facts;
  }

  /** Ends the request; what has come stays. */
  abort() {
    this.#figures.end("stopped");
    this.#controller.abort();
  }

  /**
   * Posts the request and takes its events; `onEvent()` is called behind each. Throws `ApiError` or
   * `AbortError`.
   */
  async receive(path, body, onEvent = () => {}) {
    this.node.classList.add("busy");
    this.#figures.begin(body.model);
    const response = await request(path, { body, signal: this.#controller.signal });
    try {
      for await (const data of readEvents(response.body)) {
        if (data === "[DONE]") return await this.#view.drain?.();
        this.#take(JSON.parse(data));
        onEvent();
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError(0, `The answer broke off: ${error.message}`);
    }
    throw new ApiError(0, "The connection ended before the answer did.");
  }

  #take(event) {
    if (event.error) throw new ApiError(0, event.error.message, event.error.param);
    this.#figures.take(event);
    const [choice] = event.choices;
    if (!choice) return;
    this.tokens.take(choice.logprobs?.content);
    if (choice.delta?.role) return; // opens the message, before any token
    this.#show(choice.delta ?? { content: choice.text });
  }

  #show({ content, reasoning_content: thought, tool_calls: calls }) {
    if (thought) this.#think(thought);
    if (content || calls?.length) this.#thought?.pause();
    if (content) this.#view.append(content);
    if (!calls?.length) return;
    if (!this.calls) {
      this.calls = new Calls(followSoon);
      this.node.append(this.calls.node);
    }
    this.calls.take(calls);
  }

  #think(text, keptMs) {
    if (!this.#thought) {
      this.#thought = new Thought(keptMs);
      this.#shown.before(this.#thought.node);
    }
    this.#thought.append(text);
  }

  /** Shows what went wrong, below what has come. */
  fail(error) {
    this.#figures.end("error");
    this.#failure = said(error);
    const failure = element("p", "failure", this.#failure);
    failure.setAttribute("role", "alert");
    this.node.append(failure);
  }

  /** Shows the answer as a whole, with its figures, once all of it has come. */
  finish() {
    this.node.classList.remove("busy");
    this.#thought?.pause();
    this.#view.finish();
    this.#showJson();
    this.calls?.finish();
    const figures = this.#figures.node;
    if (figures) this.node.append(figures);
  }

  /** Shows log-probabilities in the place of the text, or the text again. */
  showTokens(isShown, onAlternative) {
    this.#shown.hidden = isShown;
    if (!isShown) return this.tokens.close();
    const view = this.tokens.view(onAlternative);
    this.#shown.after(view);
    view.scrollIntoView({ block: "nearest" });
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
}
