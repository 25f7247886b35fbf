// The conversations that the browser keeps, in IndexedDB; and small settings of the page, in
// localStorage. Where a browser keeps nothing, the page works without.

import { say } from "./menu.js";
import { mapPictures } from "./pictures.js";
import { Conversation, newId } from "./tree.js";

const VERSION = 2; // from 2 on, pictures are kept apart from the conversations
const TABLES = ["conversations", "pictures"];
const PICTURE = "picture:"; // begins the ids of pictures
// several servers may be behind one host, each below a path of its own
const NAME = `aioinfer${location.pathname}`;

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/**
 * The kept conversations. Each picture is kept once, under an id that stands in the messages for its
 * data URL: a conversation is kept once a second while an answer comes. Other tabs of the page hear
 * of every change.
 */
export class Store {
  #database = null;
  #channel = new BroadcastChannel(NAME);
  #ids = new Map(); // of pictures, by their data URL
  #urls = new Map(); // the other way round
  #written = new Map(); // the ids of the pictures that were written for each conversation

  /** `onChange(id)` hears of the conversations that another tab has changed. */
  constructor(onChange) {
    this.#channel.onmessage = ({ data }) => onChange(data);
  }

  /** Opens the database; returns whether the browser keeps anything. */
  async open() {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = ({ oldVersion }) => {
        if (oldVersion < 1) request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("pictures");
      };
      this.#database = await settled(request);
      // room for a later version of the page, in another tab, that changes the tables
      this.#database.onversionchange = () => {
        this.#database.close();
        this.#database = null;
        say("A newer version of the page is open: reload this one, or nothing more is kept.");
      };
    } catch {
      this.#database = null;
    }
    return this.#database !== null;
  }

  /** Returns all conversations, and removes the pictures that are in none of them. */
  async all() {
    if (!this.#database) return [];
    const [conversations, pictures] = this.#begin("readwrite");
    const [found, ids, urls] = await Promise.all(
      [conversations.getAll(), pictures.getAllKeys(), pictures.getAll()].map(settled),
    );
    ids.forEach((id, index) => this.#note(id, urls[index]));
    const read = found.map((saved) => this.#read(saved));
    const used = new Set(found.flatMap(idsOf));
    for (const id of ids) if (!used.has(id)) pictures.delete(id);
    return read;
  }

  /** Returns a conversation, or null. */
  async get(id) {
    if (!this.#database) return null;
    const [conversations, pictures] = this.#begin("readonly");
    const saved = await settled(conversations.get(id));
    if (!saved) return null;
    for (const each of idsOf(saved)) this.#note(each, await settled(pictures.get(each)));
    return this.#read(saved);
  }

  /**
   * Keeps a conversation as it is now, unless it is private or removed; an empty one is removed.
   * Returns whether the browser could.
   */
  async put(conversation) {
    const { id, isPrivate, isEmpty, isRemoved } = conversation;
    if (isEmpty) return this.remove(id);
    if (!this.#database || isPrivate || isRemoved) return true;
    const saved = withPictures(conversation.toJSON(), (url) => {
      if (!url.startsWith("data:")) return url;
      if (!this.#ids.has(url)) this.#note(`${PICTURE}${newId()}`, url);
      return this.#ids.get(url);
    });
    const ids = idsOf(saved);
    const [conversations, pictures] = this.#begin("readwrite");
    try {
      if (this.#written.get(id) !== ids.join())
        for (const each of ids) pictures.put(this.#urls.get(each), each);
      this.#written.set(id, ids.join());
      await settled(conversations.put(saved));
    } catch {
      this.#written.delete(id);
      return false;
    }
    this.#channel.postMessage(id);
    return true;
  }

  /** Removes a conversation; returns true, as `put` does. */
  async remove(id) {
    this.#written.delete(id); // its pictures are removed when the conversations are next read
    if (this.#database) {
      await settled(this.#begin("readwrite")[0].delete(id));
      this.#channel.postMessage(id);
    }
    return true;
  }

  #note(id, url) {
    this.#ids.set(url, id);
    this.#urls.set(id, url);
  }

  #read(saved) {
    return new Conversation(withPictures(saved, (id) => this.#urls.get(id) ?? id));
  }

  /** Begins a transaction; returns its tables. */
  #begin(mode) {
    const transaction = this.#database.transaction(TABLES, mode);
    return TABLES.map((name) => transaction.objectStore(name));
  }
}

/** A kept conversation with the address of each picture replaced by what `change` returns. */
function withPictures(saved, change) {
  const nodes = saved.nodes.map((node) => ({ ...node, message: mapPictures(node.message, change) }));
  return { ...saved, nodes };
}

/** The ids of the pictures of a kept conversation. */
function idsOf(saved) {
  const found = [];
  withPictures(saved, (url) => found.push(url));
  return found.filter((url) => url.startsWith(PICTURE));
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
