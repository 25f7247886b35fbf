// What the user sets for requests: system prompt, sampling, tools, a schema that the answer follows,
// and with what the answer is compared.

import { Presets } from "./presets.js";

const EXAMPLES = {
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Returns the weather of a city",
        parameters: {
          type: "object",
          properties: {
            city: { type: "string", maxLength: 30 },
            unit: { enum: ["celsius", "fahrenheit"] },
          },
          required: ["city", "unit"],
        },
      },
    },
  ],
  response_format: {
    type: "object",
    properties: {
      city: { type: "string", maxLength: 30 },
      country: { type: "string", maxLength: 30 },
      population: { type: "integer", minimum: 0, maximum: 50000000 },
    },
    required: ["city", "country", "population"],
    additionalProperties: false,
  },
};

const NUM_ALTERNATIVES = 5; // beside each token, where probabilities are asked for

const $ = (id) => document.getElementById(id);

/** Returns the buttons that fill a field and that empty it. */
function buttonsOf({ name }) {
  const [example, remove] = ["example", "remove"].map((what) =>
    document.querySelector(`[data-${what}="${name}"]`),
  );
  return { example, remove };
}

export class Settings {
  #fields = $("composer").elements;
  #isChat = true;
  #presets = new Presets(this.#fields, (field, value) => this.#fill(field, value));

  constructor() {
    $("composer").addEventListener("input", (event) => this.#onInput(event.target));
    $("reset").addEventListener("click", () => {
      for (const field of this.#sampling) this.#fill(field, "");
    });
    for (const [name, example] of Object.entries(EXAMPLES)) {
      const field = this.#fields[name];
      const buttons = buttonsOf(field);
      buttons.example.addEventListener("click", () =>
        this.#fill(field, JSON.stringify(example, null, 2)),
      );
      buttons.remove.addEventListener("click", () => this.#fill(field, ""));
    }
  }

  /** Shows the defaults of what is served (`/page/info`), and what can be set with it. */
  open(info) {
    this.#isChat = info.chat;
    for (const [name, value] of Object.entries(info.defaults)) {
      this.#fields[name].placeholder = value;
    }
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
    const own = this.#readOne();
    if (!own || !this.#isChat || !this.#fields.compare.checked) return own && [own];
    const model = this.#fields.compare_model.value;
    const preset = this.#presets.get(this.#fields.compare_preset.value);
    const other = preset ? this.#readPreset(preset) : own;
    if (!other) return null;
    const label = [model, this.#fields.compare_preset.value].filter(Boolean).join(" · ");
    return [{ ...own, label: $("model").value }, { ...other, model, label }];
  }

  /** Reads the settings of a preset; those of the fields stay. */
  #readPreset(preset) {
    const before = Object.keys(preset).concat(this.#names).map((name) => this.#fields[name]);
    const kept = before.map((field) => [field, field.value, field.checked]);
    for (const name of this.#names) this.#set(this.#fields[name], preset[name] ?? "");
    const read = this.#readOne();
    for (const [field, value, checked] of kept) Object.assign(field, { value, checked });
    return read;
  }

  get #names() {
    const named = [...this.#sampling, ...["tools", "tool_choice", "one_call", "response_format"].map(
      (name) => this.#fields[name],
    )];
    return named.map((field) => field.name);
  }

  #readOne() {
    const wrong = this.#sampling.find((field) => field.validity.badInput);
    if (wrong) {
      wrong.closest("details").open = true;
      wrong.reportValidity();
      return null;
    }
    try {
      const system = this.#isChat ? this.#fields.system.value.trim() : "";
      return {
        ...(system && { system }),
        ...this.#readSampling(),
        ...(this.#isChat ? this.#readFormats() : {}),
      };
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.blame(error.field, error.message);
      this.#fields[error.field].focus();
      return null;
    }
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
    this.#set(field, value);
    this.#onInput(field);
  }

  #set(field, value) {
    if (field.type === "checkbox") field.checked = Boolean(value);
    else field.value = value || (field.name === "tool_choice" ? "auto" : "");
  }

  #onInput(field) {
    field.removeAttribute("aria-invalid");
    if ($(`${field.name}-error`)) $(`${field.name}-error`).hidden = true;
    const { example, remove } = buttonsOf(field);
    if (example) {
      example.disabled = Boolean(field.value); // it would replace what stands there
      remove.disabled = !field.value;
    }
    const isSet = (each) => (each.type === "checkbox" ? each.checked : each.value);
    const numSet = this.#sampling.filter(isSet).length;
    $("num-set").textContent = numSet ? `${numSet} set` : "";
    $("schema-set").textContent = this.#fields.response_format.value.trim() ? "set" : "";
    if (field.name === "tools") this.#showTools();
  }

  /** Shows how many tools there are, and offers each to be called. */
  #showTools() {
    let names = [];
    try {
      names = this.#parse("tools").map((tool) => tool?.function?.name).filter(Boolean);
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

  #readSampling() {
    const body = {};
    for (const field of this.#sampling) {
      if (field.type === "number" && field.value) body[field.name] = Number(field.value);
    }
    const stops = this.#fields.stop.value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops.map((stop) => stop.replaceAll("\\n", "\n"));
    if (this.#isChat && this.#fields.logprobs.checked)
      Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
    return body;
  }

  #readFormats() {
    const body = {};
    const tools = this.#parse("tools");
    if (tools.length) {
      body.tools = tools;
      const choice = this.#fields.tool_choice.value;
      if (choice.startsWith(":")) {
        body.tool_choice = { type: "function", function: { name: choice.slice(1) } };
      } else if (choice !== "auto") body.tool_choice = choice;
      if (this.#fields.one_call.checked) body.parallel_tool_calls = false;
    }
    const schema = this.#parse("response_format");
    if (schema !== null) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    return body;
  }

  /** Returns the JSON of a field; of an empty one no tools, or null. Throws `FieldError`. */
  #parse(name) {
    const text = this.#fields[name].value.trim();
    if (!text) return name === "tools" ? [] : null;
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
}

/** A field that cannot be sent as it is. */
class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}
