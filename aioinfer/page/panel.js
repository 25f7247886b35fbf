// The panel of an engine: the charts of what the live stream reports of it.

import { drawBar, drawCells, drawColumns, drawHeat, drawSparkline } from "./charts.js";
import { $, whole } from "./elements.js";

const SPAN_MS = 120_000; // of the sparklines
const NUM_STEPS = 100; // of the timeline
const PHASES = ["result", "update", "plan", "post", "emit"];

const times = new Intl.NumberFormat("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

/** The panel of one engine. */
export class EnginePanel {
  #root;
  #values = {};
  #charts = {};
  #state = null;
  #experts = null; // the last report, with the cells as bytes
  #time = 0;
  #rates = []; // { at, in, out }; null after an interruption
  #steps = [];
  #selected = -1; // index of a step from the right, -1 for none

  constructor(name) {
    this.#root = $("engine-template").content.cloneNode(true).firstElementChild;
    for (const node of this.#root.querySelectorAll("[data-value]"))
      this.#values[node.dataset.value] = node;
    for (const node of this.#root.querySelectorAll("[data-chart]"))
      this.#charts[node.dataset.chart] = node;
    this.#root.querySelector("h2").textContent = name;
    $("engine").append(this.#root);
    this.#listen(this.#root.querySelector(".timeline"));
  }

  #listen(timeline) {
    timeline.addEventListener("pointermove", (event) => {
      const box = timeline.getBoundingClientRect();
      this.#select(NUM_STEPS - 1 - Math.floor(((event.clientX - box.left) / box.width) * NUM_STEPS));
    });
    timeline.addEventListener("pointerleave", () => this.#select(-1));
    timeline.addEventListener("blur", () => this.#select(-1));
    timeline.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: 1, ArrowDown: 1, ArrowRight: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      this.#select(Math.max(0, this.#selected + move));
    });
  }

  #select(fromRight) {
    this.#selected = Math.min(fromRight, this.#steps.length - 1);
    this.#drawTimeline();
  }

  /**
   * Forgets the last state: counters may begin again at 0, and what happened meanwhile belongs to no
   * moment.
   */
  interrupt() {
    this.#state = null;
    this.#steps = [];
    this.#rates.push({ at: performance.now(), in: null, out: null });
  }

  /** Takes a state; `time` is the server's, in seconds. */
  take(state, time) {
    const at = performance.now();
    this.#drawStages(state.stages, this.#state?.stages);
    if (this.#state && time > this.#time) {
      const rate = (name) => (state[name] - this.#state[name]) / (time - this.#time);
      this.#rates.push({ at, in: rate("prompt_tokens"), out: rate("generation_tokens") });
    }
    this.#rates = this.#rates.filter((rate) => at - rate.at < SPAN_MS);
    this.#steps = [...this.#steps, ...state.log].slice(-NUM_STEPS);
    if (state.experts) {
      const cells = Uint8Array.from(atob(state.experts.cells), (byte) => byte.charCodeAt(0));
      this.#experts = { ...state.experts, cells };
    }
    this.#state = state;
    this.#time = time;
    this.draw();
  }

  /** Draws everything again. */
  draw() {
    if (!this.#state) return;
    this.#drawState(this.#state);
    this.#drawRates();
    this.#drawExperts();
    this.#drawTimeline();
  }

  #write(name, text) {
    this.#values[name].textContent = text;
  }

  #drawState(state) {
    this.#drawOutage(state);
    for (const name of ["running", "waiting", "preemptions"])
      this.#write(name, whole.format(state[name]));
    this.#write("slots", `${whole.format(state.running)} of ${whole.format(state.slots)} in use`);
    drawCells(this.#charts.slots, state.running, state.slots);
    this.#charts.slots.ariaLabel = `${state.running} of ${state.slots} slots in use`;

    const free = state.blocks - state.blocks_used - state.blocks_cached;
    this.#write("block-size", `${whole.format(state.blocks)}, ${state.block_size} tokens each`);
    this.#write("blocks-used", whole.format(state.blocks_used));
    this.#write("blocks-cached", whole.format(state.blocks_cached));
    this.#write("blocks-free", whole.format(free));
    const parts = [["used", state.blocks_used], ["cached", state.blocks_cached], ["free", free]];
    drawBar(this.#charts.blocks, parts);
    this.#charts.blocks.ariaLabel =
      `${state.blocks_used} blocks used, ${state.blocks_cached} cached, ${free} free`;
    const share = (part, all) => (all ? percent.format(part / all) : "–");
    this.#write("prefix", share(state.prefix_hit, state.prefix_queried));
    this.#write("drafts", share(state.accepted_tokens, state.draft_tokens));
  }

  /** Shows which part of the time since the last state each pipeline stage idled (bubbles). */
  #drawStages(stages, before) {
    const node = this.#values.stages;
    node.hidden = !stages.length;
    if (!stages.length || before?.length !== stages.length) return;
    const parts = stages.map(([busy, idle], number) => {
      const spent = [busy - before[number][0], Math.max(0, idle - before[number][1])];
      const total = spent[0] + spent[1];
      return total > 0 ? percent.format(spent[1] / total) : "–";
    });
    node.textContent = `Pipeline stages idle while steps are in flight: ${parts.join(", ")}`;
  }

  /** Says why the engine does not serve, if it does not. */
  #drawOutage({ dead, restart, asleep }) {
    const [attempt, attempts] = restart ?? [];
    const text = restart
      ? `The workers were lost and are restarting: attempt ${attempt} of ${attempts}. ` +
        "Requests wait."
      : dead
        ? `Dead: ${dead.split("\n")[0]}`
        : asleep
          ? "Asleep: a request that names it wakes it up."
          : "";
    const node = this.#values.outage;
    // written only when it changes: screen readers read it aloud
    if (node.textContent !== text) node.textContent = text;
    node.hidden = !text;
  }

  #drawRates() {
    const now = performance.now();
    for (const name of ["out", "in"]) {
      const points = this.#rates.map((rate) => ({ at: rate.at, value: rate[name] }));
      const value = whole.format(Math.round(points.at(-1)?.value ?? 0));
      const colour = name === "out" ? "decode" : "prefill";
      drawSparkline(this.#charts[name], points, now, SPAN_MS, colour);
      this.#write(name, value);
      this.#charts[name].ariaLabel = `${value} tokens a second ${name}`;
    }
  }

  /** Draws the load of the experts, of models that have any. */
  #drawExperts() {
    if (!this.#experts) return;
    const { layers, experts, layer, imbalance, rank_imbalance: ofRanks, cells } = this.#experts;
    this.#root.querySelector("[data-part=experts]").hidden = false;
    drawHeat(this.#charts.experts, cells, layers, experts);
    const busiest = `busiest ${times.format(imbalance)} × the mean (layer ${layer})`;
    const ranks = ofRanks === null ? "" : `; busiest rank ${times.format(ofRanks)} ×`;
    this.#write("experts", `${layers} layers of ${experts}`);
    this.#write("imbalance", busiest + ranks);
    this.#charts.experts.ariaLabel = `Tokens by layer and expert: ${busiest}${ranks}`;
  }

  #drawTimeline() {
    const steps = this.#steps;
    const selected = this.#selected < 0 ? -1 : steps.length - 1 - this.#selected;
    const draw = (chart, names, row) =>
      drawColumns(this.#charts[chart], steps.map(row), names, NUM_STEPS, selected);
    const most = draw("tokens", ["decode", "prefill"], (step) => [step[2], step[1]]);
    this.#write("max-tokens", `max ${whole.format(most)}`);
    this.#write("max-worker", `max ${duration(draw("worker", ["worker"], (step) => [step[4]]))}`);
    this.#write("max-loop", `max ${duration(draw("loop", PHASES, (step) => step.slice(5)))}`);
    if (this.#state) this.#write("steps", `${whole.format(this.#state.steps)} since the start`);
    this.#describe(steps, selected);
  }

  /** Describes in words what the timeline shows of the selected step, or of all. */
  #describe(steps, selected) {
    const timeline = this.#root.querySelector(".timeline");
    const shown = selected < 0 ? steps : [steps[selected]];
    let text = "No step since the page was opened.";
    if (shown.length) {
      const mean = (index) => shown.reduce((sum, step) => sum + step[index], 0) / shown.length;
      const title =
        selected < 0 ? `Mean of ${shown.length} steps` : `Step ${whole.format(shown[0][0])}`;
      const tokens = [1, 2].map((index) => Number(mean(index).toFixed(1)));
      const loop = PHASES.map((name, index) => [name, mean(5 + index)]);
      text =
        `${title}: ${tokens[0]} prefill and ${tokens[1]} decode tokens, ` +
        `${duration(mean(4))} in the worker, ` +
        `${duration(loop.reduce((sum, [, us]) => sum + us, 0))} in the event loop\n` +
        loop.map(([name, us]) => `${name} ${duration(us)}`).join(" · ");
    }
    this.#write("readout", text);
    timeline.ariaValueText = text;
    timeline.ariaValueMax = Math.max(0, steps.length - 1);
    timeline.ariaValueNow = selected < 0 ? Math.max(0, steps.length - 1) : selected;
  }
}

/** Words a time in microseconds. */
function duration(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  return us < 1e6 ? `${(us / 1000).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}
