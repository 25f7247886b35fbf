// What the user sets for requests: system prompt, sampling, tools, a schema that the answer follows,
// and with what the answer is compared.

import { $ } from "./elements.js";
import { Presets } from "./presets.js";

const NUM_ALTERNATIVES = 5; // beside each token, where probabilities are asked for

/** The buttons that fill a field and that empty it. */
const buttonsOf = ({ name }) =>
  ["example", "remove"].map((what) => document.querySelector(`[data-${what}="${name}"]`));

export class Settings {
  #fields = $("composer").elements;
  #isChat = true;
  #presets = new Presets($("composer"), (field, value) => this.#fill(field, value));

  constructor() {
    $("composer").addEventListener("input", (event) => this.#onInput(event.target));
    $("reset").addEventListener("click", () => {
      for (const field of this.#sampling) this.#fill(field, "");
    });
    for (const { dataset, textContent } of document.querySelectorAll("[data-example-of]")) {
      const field = this.#fields[dataset.exampleOf];
      const values = [textContent.trim(), ""];
      for (const [index, made] of buttonsOf(field).entries())
        made.addEventListener("click", () => {
          this.#fill(field, values[index]);
          buttonsOf(field)[1 - index].focus(); // this one is disabled now
        });
    }
    this.#presets.restore();
  }

  /** Shows the defaults of what is served (`/page/info`), and what can be set with it. */
  open(info) {
    this.#isChat = info.chat;
    for (const [name, value] of Object.entries(info.defaults))
      this.#fields[name].placeholder = value;
    for (const field of document.querySelectorAll(".chat-only")) field.hidden = !info.chat;
    const without = info.chat ? "what fits" : "16"; // as OpenAI's API has it
    this.#fields.max_tokens.placeholder = info.defaults.max_tokens ?? without;
  }

  /**
   * Returns what is set, as a list with the fields of a request; what is left empty is up to the
   * model. Where two answers are compared the list has two entries, with the `label` of each. Where
   * something cannot be sent, says so at its place and returns null.
   */
  read() {
    const wrong = this.#sampling.find((field) => field.validity.badInput);
    if (wrong) {
      wrong.closest("details").open = true;
      wrong.reportValidity();
      return null;
    }
    try {
      const own = this.#bodyOf(this.#presets.values);
      if (!this.#isChat || !this.#fields.compare.checked) return [own];
      const { value: model } = this.#fields.compare_model;
      const { value: preset } = this.#fields.compare_preset;
      const other = this.#bodyOf(this.#presets.get(preset));
      const label = [model, preset].filter(Boolean).join(" · ");
      const first = $("model").value;
      const second = label === first ? `${label}, again` : label;
      return [{ ...own, label: first }, { ...other, model, label: second }];
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.blame(error.field, error.message);
      this.#fields[error.field].focus();
      return null;
    }
  }

  /** The fields of a request with values by name; throws `FieldError`. */
  #bodyOf(values) {
    const body = {};
    if (this.#isChat && values.system?.trim()) body.system = values.system.trim();
    for (const { type, name } of this.#sampling)
      if (type === "number" && values[name]) body[name] = Number(values[name]);
    const stops = (values.stop ?? "").split("\n").filter(Boolean);
    if (stops.length) body.stop = stops.map((stop) => stop.replaceAll("\\n", "\n"));
    return this.#isChat ? { ...body, ...formatsOf(values) } : body;
  }

  /** Shows at a field what is wrong with it; `param` is a field of a request or a place in one. */
  blame(param, message) {
    const field = this.#fields[/^\w*/.exec(param ?? "")[0]];
    if (!field?.closest?.("details")) return;
    field.closest("details").open = true;
    field.setAttribute("aria-invalid", "true");
    const said = $(`${field.name}-error`);
    if (!said) return;
    said.textContent = message;
    said.hidden = false;
  }

  get #sampling() {
    return [...document.querySelectorAll(".settings :is(input, textarea)")];
  }

  #fill(field, value) {
    if (field.type === "checkbox") field.checked = Boolean(value);
    else field.value = value || (field.name === "tool_choice" ? "auto" : "");
    this.#onInput(field);
  }

  #onInput(field) {
    field.removeAttribute("aria-invalid");
    if ($(`${field.name}-error`)) $(`${field.name}-error`).hidden = true;
    const [example, remove] = buttonsOf(field);
    if (example) {
      example.disabled = Boolean(field.value); // it would replace what stands there
      remove.disabled = !field.value;
    }
    const isSet = (each) => (each.type === "checkbox" ? each.checked : each.value);
    const numSet = this.#sampling.filter(isSet).length;
    $("num-set").textContent = numSet ? `${numSet} set` : "";
    $("schema-set").textContent = this.#fields.response_format.value.trim() ? "set" : "";
    $("compare-set").textContent = this.#fields.compare.checked ? "on" : "";
    if (field.name === "tools") this.#showTools();
    if (field.closest(".folds")) this.#presets.keep();
  }

  /** Shows how many tools there are, and offers each to be called. */
  #showTools() {
    let names = [];
    try {
      const tools = jsonOf(this.#presets.values, "tools") ?? [];
      names = tools.map((tool) => tool?.function?.name).filter(Boolean);
    } catch {
      // it is said when the tools are to be sent: they may still be being written
    }
    $("num-tools").textContent = names.length ? `${names.length} set` : "";
    const choice = this.#fields.tool_choice;
    const chosen = choice.value;
    $("named-tools").replaceChildren(...names.map((name) => new Option(name, `:${name}`)));
    $("named-tools").hidden = !names.length;
    choice.value = chosen;
    if (!choice.value) choice.value = "auto";
  }
}

/** What a chat has beside sampling: probabilities, tools, a schema. Throws `FieldError`. */
function formatsOf(values) {
  const body = {};
  if (values.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  const tools = jsonOf(values, "tools");
  if (tools?.length) {
    body.tools = tools;
    const { tool_choice: choice = "auto" } = values;
    const named = { type: "function", function: { name: choice.slice(1) } };
    if (choice.startsWith(":")) body.tool_choice = named;
    else if (choice !== "auto") body.tool_choice = choice;
    if (values.one_call) body.parallel_tool_calls = false;
  }
  const schema = jsonOf(values, "response_format");
  if (schema !== null)
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

/** Returns the JSON of a value, null where there is none. Throws `FieldError`. */
function jsonOf(values, name) {
  const text = (values[name] ?? "").trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `This is no JSON: ${error.message}.`);
  }
  if (name === "tools" && !Array.isArray(value)) {
    throw new FieldError(name, "Tools are a list: put [ and ] around them.");
  }
  const isSchema = typeof value === "boolean" || (value && typeof value === "object");
  if (name !== "tools" && (!isSchema || Array.isArray(value))) {
    throw new FieldError(name, 'A schema is an object, such as {"type": "object"}.');
  }
  return value;
}

/** A field that cannot be sent as it is. */
class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}
