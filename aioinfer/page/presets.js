// Presets: settings under a name, which the browser keeps.

import { keep, recall } from "./store.js";

const FIELDS = [
  "system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "stop", "tools", "tool_choice", "one_call",
  "response_format", "logprobs",
];

const $ = (id) => document.getElementById(id);
const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

/** The presets and the fields that they fill. */
export class Presets {
  #fields;
  #fill;
  #all = recall("presets", {});

  /** `fill(field, value)` fills a field of the composer. */
  constructor(fields, fill) {
    this.#fields = fields;
    this.#fill = fill;
    $("preset").addEventListener("change", () => this.#apply($("preset").value));
    $("preset-save").addEventListener("click", () => this.#save());
    $("preset-remove").addEventListener("click", () => this.#remove());
    this.#show();
  }

  /** The values of a preset by field; none for the settings as they stand. */
  get(name) {
    return this.#all[name] ?? null;
  }

  #apply(name) {
    $("preset-remove").disabled = !name;
    const preset = this.get(name);
    if (!preset) return;
    for (const field of FIELDS) this.#fill(this.#fields[field], preset[field] ?? "");
  }

  #save() {
    const name = $("preset-name").value.trim();
    if (!name) {
      $("preset-name").focus();
      return;
    }
    this.#all[name] = Object.fromEntries(
      FIELDS.map((field) => [field, valueOf(this.#fields[field])]).filter(([, value]) => value),
    );
    $("preset-name").value = "";
    this.#keep(name);
  }

  #remove() {
    delete this.#all[$("preset").value];
    this.#keep("");
  }

  #keep(chosen) {
    const kept = keep("presets", this.#all);
    $("preset-said").textContent = kept ? "" : "This browser keeps nothing: the preset is lost with the page.";
    this.#show(chosen);
  }

  #show(chosen = "") {
    const names = Object.keys(this.#all).sort((a, b) => a.localeCompare(b));
    for (const [id, none] of [["preset", "none"], ["compare-preset", "the settings above"]])
      $(id).replaceChildren(new Option(none, ""), ...names.map((name) => new Option(name, name)));
    $("preset").value = chosen;
    $("preset-remove").disabled = !chosen;
  }
}
