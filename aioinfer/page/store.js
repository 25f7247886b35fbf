// The conversations that the browser keeps, in IndexedDB; and small settings of the page, in
// localStorage. Where a browser keeps nothing, the page works without.

import { Conversation } from "./tree.js";

const VERSION = 1;
const TABLE = "conversations";
// several servers may be behind one host, each below a path of its own
const NAME = `aioinfer${location.pathname}`;

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** The kept conversations. Other tabs of the page hear of every change. */
export class Store {
  #database = null;
  #channel = new BroadcastChannel(NAME);

  /** `onChange(id)` hears of the conversations that another tab has changed. */
  constructor(onChange) {
    this.#channel.onmessage = ({ data }) => onChange(data);
  }

  /** Opens the database; returns whether the browser keeps anything. */
  async open() {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      this.#database = await settled(request);
    } catch {
      this.#database = null;
    }
    return this.#database !== null;
  }

  /** Returns all conversations, the one that was changed last first. */
  async all() {
    if (!this.#database) return [];
    const saved = await settled(this.#table("readonly").getAll());
    return saved.map((each) => new Conversation(each)).sort((a, b) => b.updated - a.updated);
  }

  /** Returns a conversation, or null. */
  async get(id) {
    const saved = this.#database && (await settled(this.#table("readonly").get(id)));
    return saved ? new Conversation(saved) : null;
  }

  /** Keeps a conversation as it is now, unless it is private, empty or removed. */
  async put(conversation) {
    const { isPrivate, isEmpty, isRemoved } = conversation;
    if (!this.#database || isPrivate || isEmpty || isRemoved) return;
    await settled(this.#table("readwrite").put(conversation.toJSON()));
    this.#channel.postMessage(conversation.id);
  }

  async remove(id) {
    if (!this.#database) return;
    await settled(this.#table("readwrite").delete(id));
    this.#channel.postMessage(id);
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

/** Returns a small value that the browser keeps by name; `none` where there is no such value. */
export function recall(name, none = null) {
  try {
    return JSON.parse(localStorage.getItem(`${NAME}:${name}`)) ?? none;
  } catch {
    return none;
  }
}

/** Keeps a small value by name. Returns whether the browser does. */
export function keep(name, value) {
  try {
    localStorage.setItem(`${NAME}:${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
