// A conversation: messages as a tree, of which one path is shown. An edited message and a further
// answer are versions beside the old ones; none is lost.

import { parsed } from "./json.js";
import { picturesOf, textOf } from "./pictures.js";

/** The id of the root, which has no message. */
const ROOT = "";

export const newId = () => Math.random().toString(36).slice(2, 10) + Date.now().toString(36);

/**
 * One conversation. A node is `{ id, parent, message, facts, chosen }`: `message` as the API has it;
 * `facts` is what the page knows of it besides (model, usage, times, why it ended); `chosen` is the
 * id of the child that the path goes on with.
 */
export class Conversation {
  /** Takes what `toJSON` returned; by default there is nothing yet. */
  constructor(saved = {}) {
    this.id = saved.id ?? newId();
    this.title = saved.title ?? "";
    this.isNamed = saved.isNamed ?? false; // by the user
    this.isPinned = saved.isPinned ?? false;
    this.isPrivate = saved.isPrivate ?? false;
    this.isRemoved = false;
    this.updated = saved.updated ?? Date.now();
    const root = { id: ROOT, parent: null, message: null, facts: {}, chosen: null };
    this.nodes = new Map([[ROOT, root]]);
    for (const node of saved.nodes ?? []) this.nodes.set(node.id, { ...node });
  }

  toJSON() {
    const { id, title, isNamed, isPinned, updated } = this;
    return { id, title, isNamed, isPinned, updated, nodes: [...this.nodes.values()] };
  }

  get isEmpty() {
    return this.nodes.size === 1;
  }

  get(id) {
    return this.nodes.get(id);
  }

  /** The nodes that are shown, first to last. */
  get path() {
    const path = [];
    for (let id = this.get(ROOT).chosen; id; id = this.get(id)?.chosen) {
      if (!this.get(id)) break;
      path.push(this.get(id));
    }
    return path;
  }

  get last() {
    return this.path.at(-1) ?? this.get(ROOT);
  }

  /** The messages from the first to that of a node, as a request has them. */
  messagesTo(id) {
    const messages = [];
    for (let node = this.get(id); node?.message; node = this.get(node.parent))
      messages.unshift(node.message);
    return messages;
  }

  /** Adds a message behind another, as its version that is shown; returns its node. */
  add(parent, message, facts = {}) {
    const node = { id: newId(), parent, message, facts, chosen: null };
    this.nodes.set(node.id, node);
    this.choose(node.id);
    if (message.role === "user" && !this.isNamed && !this.title) this.title = titleOf(message);
    return node;
  }

  /** The versions of a message, oldest first, with itself. */
  versions(id) {
    const { parent } = this.get(id);
    return [...this.nodes.values()].filter((node) => node.parent === parent);
  }

  /** Shows a node in the place of its other versions. */
  choose(id) {
    this.get(this.get(id).parent).chosen = id;
  }

  /** Removes a message with all that follows it; the version before it is shown then. */
  remove(id) {
    const versions = this.versions(id);
    const index = versions.findIndex((node) => node.id === id);
    const parent = this.get(this.get(id).parent);
    if (parent.chosen === id) parent.chosen = (versions[index - 1] ?? versions[index + 1])?.id ?? null;
    for (const each of this.#below(id)) this.nodes.delete(each);
    if (this.isEmpty && !this.isNamed) this.title = "";
  }

  #below(id) {
    const found = [id];
    for (let index = 0; index < found.length; index++)
      for (const node of this.nodes.values()) if (node.parent === found[index]) found.push(node.id);
    return found;
  }

  /** All that was said, in any version, for the search. */
  get text() {
    return [this.title, ...[...this.nodes.values()].map((node) => textOf(node.message?.content))].join("\n");
  }

  /** The path as Markdown. */
  toMarkdown() {
    const names = { user: "User", assistant: "Assistant", tool: "Tool", system: "System" };
    const parts = this.path.map(({ message }) => {
      const pictures = picturesOf(message.content).map(() => "*(a picture)*");
      const calls = (message.tool_calls ?? []).map(
        ({ function: called }) => `Call of \`${called.name}\`: \`${called.arguments}\``,
      );
      const said = [...pictures, textOf(message.content), ...calls].filter(Boolean);
      return [`## ${names[message.role]}`, ...said].join("\n\n");
    });
    return `# ${this.title || "Conversation"}\n\n${parts.join("\n\n")}\n`;
  }
}

/** The first words of a message. */
function titleOf(message) {
  const words = (textOf(message.content).trim() || "A picture").split(/\s+/).join(" ");
  const letters = [...words]; // an emoji is not cut in half
  return letters.length > 60 ? `${letters.slice(0, 59).join("")}…` : words;
}

/** Returns the conversations of an exported file. Throws where it is none. */
export function imported(text) {
  const found = parsed(text);
  if (found === undefined) throw new Error("This file is no JSON.");
  const list = Array.isArray(found) ? found : (found?.conversations ?? [found]);
  if (!Array.isArray(list) || !list.length) throw new Error("No conversation is in this file.");
  return list.map((saved) => {
    if (!isConversation(saved)) throw new Error("This file holds something else than conversations.");
    return new Conversation({ ...saved, id: newId() });
  });
}

/** Whether a value of a file has the shape of a conversation: a message stands behind its parent. */
function isConversation(saved) {
  if (!Array.isArray(saved?.nodes)) return false;
  const known = new Set([ROOT]);
  const isTree = saved.nodes.every((node) => {
    const isMessage = typeof node?.message?.role === "string" && known.has(node.parent);
    if (!(isMessage || node?.id === ROOT) || typeof node.id !== "string" || !node.facts) return false;
    return known.add(node.id);
  });
  return isTree && saved.nodes.every(({ chosen }) => chosen === null || known.has(chosen));
}
