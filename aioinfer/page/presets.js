// Presets: settings under a name, which the browser keeps, as it keeps those that stand in the fields.

import { $ } from "./elements.js";
import { offerUndo, say } from "./menu.js";
import { keep, recall } from "./store.js";

const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

/** The presets and the fields that they fill. */
export class Presets {
  #fields;
  #fill;
  #all = recall("presets", {});

  /** `fill(field, value)` fills a field of the composer. */
  constructor(form, fill) {
    this.#fields = [...form].filter(({ name }) => name && !name.startsWith("compare"));
    this.#fill = fill;
    $("preset").addEventListener("change", () => this.#choose($("preset").value));
    $("preset-save").addEventListener("click", () => this.#save());
    $("preset-remove").addEventListener("click", () => this.#remove());
    this.#show();
  }

  /** What stands in the fields, by name, without what is empty. */
  get values() {
    const all = this.#fields.map((field) => [field.name, valueOf(field)]);
    return Object.fromEntries(all.filter(([, value]) => value));
  }

  /** The values of a preset; by default those of the fields. */
  get(name) {
    return this.#all[name] ?? this.values;
  }

  /** Fills the fields with what they held when the page was last used. */
  restore() {
    this.#apply(recall("settings", {}));
  }

  /** Has what stands in the fields outlive the page. */
  keep() {
    keep("settings", this.values);
  }

  #apply(values) {
    for (const field of this.#fields) this.#fill(field, values[field.name] ?? "");
  }

  #choose(name) {
    $("preset-remove").disabled = !name;
    $("preset-name").value = name;
    if (name) this.#apply(this.#all[name]);
  }

  #save() {
    const name = $("preset-name").value.trim();
    if (!name) return $("preset-name").focus();
    const isKept = this.#put(name, this.values);
    const lost = "This browser keeps nothing: the preset is lost with the page.";
    say(isKept ? `Preset “${name}” saved.` : lost);
  }

  #remove() {
    const { value: name } = $("preset");
    const removed = this.#all[name];
    this.#put(name, null);
    offerUndo(`Preset “${name}” removed.`, () => this.#put(name, removed));
  }

  #put(name, values) {
    const { [name]: _, ...others } = this.#all;
    this.#all = values ? { ...others, [name]: values } : others;
    this.#show(values ? name : "");
    return keep("presets", this.#all);
  }

  #show(chosen = "") {
    const names = Object.keys(this.#all).sort((a, b) => a.localeCompare(b));
    for (const [id, none] of [["preset", "none"], ["compare-preset", "the settings above"]])
      $(id).replaceChildren(new Option(none, ""), ...names.map((name) => new Option(name, name)));
    $("preset").value = $("preset-name").value = chosen;
    $("preset-remove").disabled = !chosen;
  }
}
