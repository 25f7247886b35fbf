// The chat: one conversation, its turns, and the answers that come. Answers are shown as Markdown, or
// as JSON where a schema was set; what the user writes, and what a model without a chat template
// writes, as it is.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { $ } from "./elements.js";
import { JsonView } from "./json.js";
import { MarkdownView } from "./markdown.js";
import { offerUndo, say } from "./menu.js";
import { requestOf } from "./requests.js";
import { Conversation } from "./tree.js";
import { Turn } from "./turn.js";
import { followEnd, PlainView, showEnd } from "./views.js";

const SAVE_MS = 1000; // how often an answer that is coming is kept

export class Chat {
  #info = { chat: true };
  #composer;
  #conversation = new Conversation();
  #calls = null; // those of the last answer, while their results are being written
  #running = new Set(); // the answers that are coming
  #isLeft = false; // whether the page is being left, which ends its requests
  #store;
  #onChange;
  #actions = {
    versions: ({ id }) => this.#conversation.versions(id),
    choose: ({ id }, label) => this.#choose(id, label),
    remove: (node) => this.#remove(node),
    edit: (node, content) => this.#edit(node, content),
    regenerate: ({ parent }) => this.#goOn(parent),
    resume: (node) => this.#goOn(node.parent, node),
    branch: (node, text) => this.#branch(node, text),
  };

  /**
   * `onChange(conversation)` hears of every change of a conversation: mostly of the open one, but an
   * answer that ends because another one was opened changes the one that was left.
   */
  constructor(store, onChange) {
    this.#store = store;
    this.#onChange = onChange;
    this.#composer = new Composer({
      send: (content) => this.#sendPrompt(content),
      stop: () => this.#stop(),
      messages: () => this.#conversation.messagesTo(this.#conversation.last.id),
    });
    $("log").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#calls) this.#ask(this.#calls.results());
    });
    addEventListener("pagehide", () => (this.#isLeft = true));
    addEventListener("pageshow", () => (this.#isLeft = false)); // also when the user comes back
  }

  /** Lets the user write, once it is known what the server serves (`/page/info`). */
  open(info) {
    this.#info = info;
    this.#composer.open(info);
  }

  get conversation() {
    return this.#conversation;
  }

  /** Shows a conversation in the place of the open one; an answer that is coming ends. */
  show(conversation) {
    if (conversation === this.#conversation) return this.#composer.focus();
    this.#stop();
    this.#running.clear();
    this.#conversation = conversation;
    this.#render();
    this.#showIdle();
    this.#composer.focus();
    this.#onChange(conversation);
  }

  // ---------------------------------------------------------------- turns

  /** Sends what the user wrote; returns whether it was sent. */
  #sendPrompt(content) {
    return this.#ask([...(this.#calls?.results(true) ?? []), { role: "user", content }], content);
  }

  /** Adds messages to the conversation and has them answered. */
  #ask(messages, prompt = "") {
    const settings = this.#running.size ? null : this.#composer.settings.read();
    if (!settings) return false;
    const conversation = this.#conversation;
    const nodes = messages.map((message) => conversation.add(conversation.last.id, message));
    this.#calls?.close(true);
    this.#keep(conversation); // before the answer comes: a reload may come first
    const turn = this.#newTurn(prompt ? nodes.at(-1) : null);
    this.#answer(turn, nodes.at(-1).id, settings, { prompt, added: nodes[0] });
    return true;
  }

  /** Has the message `parent` answered once more, or the answer `kept` continued. */
  #goOn(parent, kept = null) {
    const settings = this.#running.size ? null : this.#composer.settings.read();
    if (!settings) return;
    this.#showTo(parent);
    const node = this.#conversation.get(parent);
    const turn = this.#newTurn(node.message?.role === "user" ? node : null);
    this.#answer(turn, parent, kept ? [settings[0]] : settings, { kept });
  }

  /** Adds a version of an answer that begins with `text`, and goes on from there. */
  #branch(node, text) {
    if (this.#running.size) return;
    const message = { role: "assistant", content: text };
    this.#goOn(node.parent, this.#conversation.add(node.parent, message));
  }

  #edit(node, content) {
    if (this.#running.size) return;
    const message = { ...node.message, content };
    const edited = this.#conversation.add(node.parent, message, { ...node.facts, tokens: undefined });
    this.#keep(this.#conversation);
    if (message.role === "user") this.#goOn(edited.id);
    else this.#choose(edited.id);
  }

  #choose(id, label = "") {
    if (this.#running.size) return;
    this.#conversation.choose(id);
    this.#keep(this.#conversation);
    this.#render();
    // the arrow of the version that is shown now, so that the next press goes on
    const arrows = [...$("log").querySelectorAll(`[data-of="${id}"] .arrow:not(:disabled)`)];
    (arrows.find((arrow) => arrow.ariaLabel === label) ?? arrows[0] ?? $("prompt")).focus();
  }

  #remove({ id, message }) {
    if (this.#running.size) this.#stop();
    const conversation = this.#conversation;
    const before = JSON.parse(JSON.stringify(conversation));
    conversation.remove(id);
    this.#keep(conversation);
    this.#render();
    const what = message.role === "user" ? "Message" : "Answer";
    offerUndo(`${what} deleted.`, () => {
      conversation.nodes = new Conversation(before).nodes;
      this.#keep(conversation);
      if (this.#conversation === conversation) this.#render();
    });
  }

  // ---------------------------------------------------------------- answers

  /** Has a message answered, in one column for each of `settings`. */
  async #answer(turn, parent, settings, options) {
    const conversation = this.#conversation;
    const coming = settings.map((each) => this.#receive(turn, conversation, parent, each, options));
    this.#showBusy(options.prompt);
    const nodes = await Promise.all(coming);
    const hasFailed = !nodes.some(Boolean);
    if (hasFailed) this.#giveBack(turn, conversation, options);
    if (this.#conversation !== conversation) return; // another one was opened meanwhile
    this.#showIdle(hasFailed && options.prompt ? null : this.#calls);
  }

  /**
   * Nothing came of a request: what was said is not part of the conversation, and can be sent again.
   */
  #giveBack(turn, conversation, { added, prompt }) {
    if (this.#isLeft) return; // what was said is kept, and has no answer yet
    if (added && conversation.get(added.id)) conversation.remove(added.id);
    this.#keep(conversation);
    if (this.#conversation !== conversation) return;
    const failures = turn.node.querySelectorAll(".failure");
    if (!added) this.#showTo(null); // an answer that was to be given once more
    for (const bar of turn.node.querySelectorAll(".tools")) bar.remove();
    if (!turn.node.querySelector(".thought")) turn.node.remove(); // thoughts can still be read
    $("log").append(...failures);
    $("hint").hidden = $("log").children.length > 1;
    showEnd();
    this.#calls?.close(false);
    this.#composer.putBack(prompt);
  }

  /** Receives one answer; returns its node, null if nothing came. */
  async #receive(turn, conversation, parent, { label, ...settings }, { kept = null }) {
    const View = this.#info.chat ? (settings.response_format ? JsonView : MarkdownView) : PlainView;
    const answer = new Answer(View, kept);
    let node = kept;
    let saved = performance.now();
    const save = () => {
      const { message, facts } = answer;
      if (!message || (node && !conversation.get(node.id))) return;
      if (node) Object.assign(node, { message, facts });
      else node = conversation.add(parent, message, facts);
      this.#keep(conversation);
    };
    this.#running.add(answer);
    const request = requestOf(conversation.messagesTo(kept?.id ?? parent), {
      model: $("model").value, isChat: this.#info.chat, settings,
    });
    const coming = answer.receive(request.path, request.body, () => {
      if (performance.now() - saved < SAVE_MS) return;
      saved = performance.now();
      save();
    });
    turn.add(answer, label);
    let isWhole = false;
    try {
      await coming;
      isWhole = true;
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.fail(error);
        this.#composer.settings.blame(error.param, error.message);
      }
    }
    answer.finish();
    if (isWhole && !answer.message) answer.fail(new Error("The model answered nothing."));
    this.#running.delete(answer);
    save();
    if (conversation !== this.#conversation) return node; // its turn is not shown any more
    followEnd(() => turn.complete(answer, node, request));
    if (node) this.#calls = node.message.tool_calls ? answer.calls : null;
    return node;
  }

  #stop() {
    for (const answer of this.#running) answer.abort();
  }

  #keep(conversation) {
    conversation.updated = Date.now();
    this.#onChange(conversation);
    this.#store.put(conversation).then((isKept) => {
      if (!isKept) say("This browser has no room to keep the chat.");
    });
  }

  // ---------------------------------------------------------------- the log

  #render() {
    this.#showTo(null);
    showEnd();
  }

  /** Shows the conversation up to a message, without what follows it; null for all of it. */
  #showTo(last) {
    for (const shown of $("log").querySelectorAll(":scope > :not(#hint)")) shown.remove();
    this.#calls = null;
    let turn = null;
    for (const node of this.#conversation.path) {
      const { role } = node.message;
      if (role === "assistant") this.#showKept(turn ?? this.#newTurn(null), node);
      if (role === "tool") this.#calls?.fill(node.message);
      // the answer to `last` makes its own turn
      turn = role === "user" && node.id !== last ? this.#newTurn(node) : null;
      if (node.id === last) break;
    }
    $("hint").hidden = !this.#conversation.isEmpty || last !== null;
  }

  #showKept(turn, node) {
    // a whole answer that is JSON is shown as JSON (`Answer.finish`)
    const answer = new Answer(this.#info.chat ? MarkdownView : PlainView, node);
    turn.add(answer);
    answer.finish();
    turn.complete(answer, node);
    this.#calls = node.message.tool_calls ? answer.calls : null;
  }

  #newTurn(user) {
    const turn = new Turn(this.#actions, user);
    $("hint").hidden = true;
    for (const failure of $("log").querySelectorAll(":scope > .failure")) failure.remove();
    $("log").append(turn.node);
    return turn;
  }

  #showBusy(prompt) {
    // or a screen reader would read every token by itself
    $("log").setAttribute("aria-busy", "true");
    showEnd();
    this.#composer.showBusy(prompt);
  }

  #showIdle(calls = null) {
    $("log").setAttribute("aria-busy", "false");
    this.#composer.showIdle(calls);
  }
}
