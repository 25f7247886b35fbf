// The figures of one answer: a line, and behind it the course of the request: waiting, prefill,
// decode, and what the prefix cache has saved.

import { element } from "./elements.js";

const PARTS = [
  ["waited", "waited", "queued, and on its way"],
  ["prefill", "prefill", "the prompt, up to the first token"],
  ["decode", "decode", "all further tokens"],
];

// what is said of why an answer ended; nothing of one that is complete
const REASONS = { stop: "", length: "token limit reached", tool_calls: "" };
const MIN_MEASURED = 64; // prompt tokens from which the rate of prefill is taken from

const seconds = (ms) => (ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1e3).toFixed(2)} s`);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Measures an answer that is coming, and shows what was measured. */
export class Figures {
  #sent = 0;
  #first = 0;
  #last = 0;
  #events = 0;
  #facts = {};

  /** `facts`: what was kept of an answer that has come before. */
  constructor(facts = null) {
    if (facts) this.#facts = { ...facts };
  }

  /** The request goes out. */
  begin(model) {
    this.#sent = performance.now();
    this.#first = this.#last = this.#events = 0;
    this.#facts = { model };
  }

  /** Takes an event of the stream. */
  take({ choices: [choice], usage, timings }) {
    if (usage) this.#facts.usage = usage;
    if (timings) this.#facts.timings = timings;
    if (!choice) return;
    if (choice.finish_reason) this.#facts.reason = choice.finish_reason;
    if (choice.delta?.role || choice.finish_reason !== null) return;
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.#events++;
  }

  /** Notes why the answer ended where the server does not say so. */
  end(reason) {
    this.#facts.reason = reason === "error" ? reason : (this.#facts.reason ?? reason);
  }

  get facts() {
    if (this.#first) {
      this.#facts.firstMs = this.#first - this.#sent;
      this.#facts.decodeMs = this.#last - this.#first;
      this.#facts.events = this.#events;
    }
    return this.#facts;
  }

  /** The line and what is behind it; null if no token came. */
  get node() {
    const { facts } = this;
    if (!facts.firstMs) return null;
    const summary = element("summary", "figures", lineOf(facts));
    const made = element("details", "course", "", summary, courseOf(facts));
    made.addEventListener("toggle", () => made.scrollIntoView({ block: "nearest" }));
    return made;
  }
}

function lineOf({ usage, events, firstMs, decodeMs, reason }) {
  const tokens = usage?.completion_tokens ?? events;
  const parts = [`${usage ? "" : "about "}${plural(tokens, "token")}`];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts[0] += ` (prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""})`;
  }
  parts.push(`first after ${(firstMs / 1e3).toFixed(2)} s`);
  if (tokens > 1 && decodeMs > 0) parts.push(`${(((tokens - 1) / decodeMs) * 1e3).toFixed(1)} tokens/s`);
  parts.push(REASONS[reason] ?? reason);
  return parts.filter(Boolean).join(" · ");
}

/** The course of a request: bars in proportion to the times, a sentence each. */
function courseOf(facts) {
  const { timings, firstMs, decodeMs, usage, model } = facts;
  const prefill = Math.min(firstMs, timings?.prompt_ms ?? 0);
  const times = { waited: firstMs - prefill, prefill, decode: decodeMs };
  const total = firstMs + decodeMs;
  const list = element("ol", "bars");
  for (const [name, label, meaning] of PARTS) {
    if (!times[name]) continue;
    const said = element("span", "", `${label} ${seconds(times[name])}`);
    const bar = element("i");
    bar.style.width = `${Math.max(0.5, (100 * times[name]) / total)}%`;
    list.append(element("li", `part-${name}`, "", said, bar));
    list.lastChild.title = meaning;
  }
  const sentence = element("p", "quiet", sentenceOf(usage, timings, model));
  return element("div", "course-body", "", list, sentence);
}

function sentenceOf(usage, timings, model) {
  const parts = [];
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  if (cached) {
    // the rate of few tokens says nothing: a step takes its time for one as for fifty
    const rate = timings?.prompt_n >= MIN_MEASURED ? timings.prompt_per_second : 0;
    const saved = rate ? `, which saved about ${seconds((1e3 * cached) / rate)} of prefill` : "";
    parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens were in the prefix cache${saved}.`);
  } else if (usage) parts.push("None of the prompt was in the prefix cache.");
  if (model) parts.push(`Model: ${model}.`);
  return parts.join(" ");
}
