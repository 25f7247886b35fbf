// The list of the kept conversations: search, open, rename, pin, delete, export and import.

import { $, element } from "./elements.js";
import { menu, offerUndo, saveFile, say, tool } from "./menu.js";
import { Conversation, imported } from "./tree.js";

const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

/** The list: pinned conversations first, then the one that was changed last. */
export class History {
  #store;
  #open;
  #list = [];
  #current = null;
  #shown = []; // what the list shows: four values an item
  #texts = new Map(); // of each conversation, for the search, with when it was made

  /** `open(conversation)` shows one. */
  constructor(store, open) {
    this.#store = store;
    this.#open = open;
    $("search").addEventListener("input", () => this.#show());
    $("new").addEventListener("click", () => this.#open(new Conversation()));
    const openPrivate = () => this.#open(new Conversation({ isPrivate: true }));
    $("new-private").addEventListener("click", openPrivate);
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
    $("export").addEventListener("click", () => saveJson("conversations", this.#list));
  }

  /** Reads what the browser keeps. */
  async load() {
    const kept = await this.#store.all();
    // whoever writes at once may have begun a conversation by now
    this.#list.push(...kept.filter(({ id }) => !this.get(id)));
    this.#show();
  }

  /** Notes that a conversation was changed; the open one is the list's current one. */
  take(conversation, isOpen) {
    if (isOpen) this.#current = conversation;
    const { id, isPrivate, isEmpty, isRemoved } = conversation;
    this.#list = this.#list.filter((each) => each.id !== id);
    if (!isPrivate && !isEmpty && !isRemoved) this.#list.unshift(conversation);
    this.#show();
  }

  /** Takes over what another tab has changed. */
  async refresh(id) {
    const conversation = await this.#store.get(id);
    if (id === this.#current?.id) return; // what is open here stays as it is
    this.#list = this.#list.filter((each) => each.id !== id);
    if (conversation) this.#list.push(conversation);
    this.#show();
  }

  get(id) {
    return this.#list.find((each) => each.id === id);
  }

  // ---------------------------------------------------------------- the list

  #show() {
    const wanted = $("search").value.trim().toLowerCase();
    const found = this.#list
      .filter((each) => !wanted || this.#textOf(each).includes(wanted))
      .sort((a, b) => b.isPinned - a.isPinned || b.updated - a.updated);
    const none = wanted ? "No conversation has this text." : "Conversations are kept in this browser.";
    $("no-conversation").textContent = found.length ? "" : none;
    $("export").disabled = !this.#list.length;
    const current = this.#current?.id;
    const shown = found.flatMap((each) => [each, each.title, each.isPinned, each.id === current]);
    // an answer that is coming is kept once a second, and closes no menu by that
    const isSame = shown.every((value, index) => value === this.#shown[index]);
    if (isSame && shown.length === this.#shown.length) return;
    this.#shown = shown;
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    $("conversations").replaceChildren(...found.map((each) => this.#item(each)));
    if (focused) $("conversations").querySelector(`[data-id="${focused}"] button`)?.focus();
  }

  #textOf(conversation) {
    const { id, updated } = conversation;
    const known = this.#texts.get(id);
    if (known?.updated === updated) return known.text;
    const text = conversation.text.toLowerCase();
    this.#texts.set(id, { updated, text });
    return text;
  }

  #item(conversation) {
    const item = element("li");
    item.dataset.id = conversation.id;
    const title = conversation.title || "Untitled";
    const opens = tool(title, () => this.#open(conversation));
    opens.className = "conversation";
    opens.dir = "auto";
    opens.title = `${title}\n${day.format(conversation.updated)}`;
    if (conversation.id === this.#current?.id) opens.setAttribute("aria-current", "true");
    if (conversation.isPinned) opens.prepend(element("span", "pin", "★ "));
    const name = fileName(conversation);
    const actions = menu(`More for “${title}”`, [
      ["Rename", () => this.#rename(item, conversation)],
      [conversation.isPinned ? "Unpin" : "Pin", () => this.#pin(conversation)],
      ["Export as Markdown", () => saveFile(`${name}.md`, "text/markdown", conversation.toMarkdown())],
      ["Export as JSON", () => saveJson(name, [conversation])],
      ["Delete", () => this.#remove(conversation)],
    ]);
    item.append(opens, actions);
    return item;
  }

  #rename(item, conversation) {
    const field = Object.assign(element("input"), { value: conversation.title, ariaLabel: "Title" });
    const finish = (isKept) => {
      field.onblur = null;
      if (isKept && field.value.trim()) {
        Object.assign(conversation, { title: field.value.trim(), isNamed: true });
        this.#store.put(conversation);
      }
      this.#shown = []; // the field is in the item's place
      this.#show();
      $("conversations").querySelector(`[data-id="${conversation.id}"] button`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      const ends = event.key === "Enter" || event.key === "Escape";
      if (event.isComposing || !ends) return; // Enter chooses what an input method offers
      event.stopPropagation();
      event.preventDefault(); // or Enter presses the button that has the focus then
      finish(event.key === "Enter");
    });
    field.onblur = () => finish(true);
    item.replaceChildren(field);
    field.select();
  }

  #pin(conversation) {
    conversation.isPinned = !conversation.isPinned;
    this.#store.put(conversation);
    this.#show();
  }

  #remove(conversation) {
    conversation.isRemoved = true; // an answer that is still coming does not bring it back
    this.#list = this.#list.filter((each) => each !== conversation);
    this.#store.remove(conversation.id);
    if (this.#current?.id === conversation.id) this.#open(new Conversation());
    this.#show();
    offerUndo(`“${conversation.title}” deleted.`, () => {
      conversation.isRemoved = false;
      this.#list.push(conversation);
      this.#store.put(conversation);
      this.#show();
    });
  }

  // ---------------------------------------------------------------- files

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    if (!file) return;
    try {
      const found = imported(await file.text());
      for (const conversation of found) await this.#store.put(conversation);
      this.#list.push(...found);
      this.#show();
      say(`${found.length} imported.`);
    } catch (error) {
      say(error.message);
    }
  }
}

function fileName({ title }) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
}

function saveJson(name, conversations) {
  saveFile(`${name}.json`, "application/json", JSON.stringify({ conversations }, null, 2));
}
