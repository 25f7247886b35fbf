// The tool calls of an answer as they come, and the fields for what the tools return: the user plays
// the tools.

import { element } from "./elements.js";
import { Indenter, parsed } from "./json.js";
import { codeBlock } from "./menu.js";

let numFields = 0; // of all results, for the ids that join them with their labels

/** The calls of an answer, in a form that is submitted with their results. */
export class Calls {
  node = element("form", "calls");
  #calls = [];
  #around;
  #send = element("button", "primary");

  constructor(around) {
    this.#around = around;
    this.node.noValidate = true;
    this.node.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Takes the `tool_calls` of an event. */
  take(deltas) {
    this.#around(() => {
      for (const { index, id, function: part } of deltas) {
        if (!this.#calls[index]) {
          this.#calls[index] = new Call(id, part.name);
          this.node.append(this.#calls[index].node);
        }
        this.#calls[index].append(part.arguments ?? "");
      }
    });
  }

  /** Asks for the results, once all calls have come. */
  finish() {
    for (const call of this.#calls) call.finish();
    if (!this.#complete.length) return;
    this.#send.textContent = this.#complete.length > 1 ? "Send results" : "Send result";
    const hint = "The model waits for what the tool returns. A message below goes on without it.";
    this.node.append(element("div", "actions", "", element("span", "quiet", hint), this.#send));
  }

  get #complete() {
    return this.#calls.filter((call) => call.isComplete);
  }

  /** The calls as an assistant's message has them: those that are complete. */
  get asked() {
    return this.#complete.map((call) => call.asked);
  }

  /** The messages with the results; with `isWritten` only of those in which something stands. */
  results(isWritten = false) {
    return this.#complete.map(({ result }) => result).filter(({ content }) => content || !isWritten);
  }

  /** Shows a result that was kept, `{ tool_call_id, content }`. */
  fill({ tool_call_id: id, content }) {
    const call = this.#complete.find(({ asked }) => asked.id === id);
    if (call) call.field.value = content;
    this.close(true);
  }

  /** Ends the writing of results, or lets it go on. */
  close(isClosed) {
    for (const { field } of this.#complete) field.readOnly = isClosed;
    this.#send.parentElement.hidden = isClosed;
  }

  /** Moves the focus to the first result in which nothing stands. Returns whether there is one. */
  focus() {
    const empty = [...this.node.querySelectorAll("textarea")].find((field) => !field.value);
    empty?.focus();
    return Boolean(empty);
  }

  /** Enter goes to the next result, and from the last one sends them. */
  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (event.target.tagName !== "TEXTAREA") return;
    event.preventDefault();
    if (!event.target.value || !this.focus()) this.node.requestSubmit();
  }
}

class Call {
  node = element("section", "call");
  field = element("textarea"); // for the result
  isComplete = false;
  #id;
  #name;
  #arguments = "";
  #indenter = new Indenter();
  #shown = document.createTextNode("");

  constructor(id, name) {
    this.#id = id;
    this.#name = name;
    this.node.setAttribute("aria-label", `Call of ${name}`);
    const block = codeBlock("", name);
    block.querySelector(".language").before(element("span", "kind", "Tool call"));
    block.querySelector("code").append(this.#shown);
    this.node.append(block);
  }

  append(text) {
    this.#arguments += text;
    this.#shown.appendData(this.#indenter.feed(text));
  }

  finish() {
    const given = parsed(this.#arguments || "{}");
    this.isComplete = given !== null && typeof given === "object" && !Array.isArray(given);
    if (!this.isComplete) {
      this.#shown.data = this.#arguments;
      this.node.append(element("p", "quiet", "The call is not complete: it is left out."));
      return;
    }
    Object.assign(this.field, { id: `result-${++numFields}`, rows: 2, spellcheck: false });
    const label = element("label", "", `Result of ${this.#name}`);
    label.htmlFor = this.field.id;
    this.node.append(label, this.field);
  }

  get asked() {
    const called = { name: this.#name, arguments: this.#arguments || "{}" };
    return { id: this.#id, type: "function", function: called };
  }

  get result() {
    return { role: "tool", tool_call_id: this.#id, name: this.#name, content: this.field.value };
  }
}
